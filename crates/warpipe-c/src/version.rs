//! The version, and the check that header and library are of one.

use std::ffi::c_char;

use crate::failure::{Failure, run, warpipe_status};

/// The header's major version. A library of another one is refused.
pub const WARPIPE_VERSION_MAJOR: u32 = 0;
/// The header's minor version. While the major version is 0, a library of another one is refused;
/// later, an older one.
pub const WARPIPE_VERSION_MINOR: u32 = 1;

/// The library's version, for example "0.1.0". A static string.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Whether this library is one for a header of this version: call it first, with
/// `WARPIPE_VERSION_MAJOR` and `WARPIPE_VERSION_MINOR`. A program that is linked with the library
/// is also refused by the loader, which looks for `libwarpipe.so.MAJOR.MINOR` while the major
/// version is 0, and for `libwarpipe.so.MAJOR` later.
///
/// `WARPIPE_PROTOCOL`: it is not.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_check_version(major: u32, minor: u32) -> warpipe_status {
    run(|| {
        let is_older = major > 0 && minor < WARPIPE_VERSION_MINOR;
        if major == WARPIPE_VERSION_MAJOR && (minor == WARPIPE_VERSION_MINOR || is_older) {
            return Ok(());
        }
        let version = env!("CARGO_PKG_VERSION");
        let said = format!(
            "the program was compiled with warpipe.h {major}.{minor}, and this library is {version}; compile it again with this library's header, or install that version"
        );
        Err(Failure::Own(warpipe_status::WARPIPE_PROTOCOL, said))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_headers_version_is_that_of_the_library() {
        let version = format!("{WARPIPE_VERSION_MAJOR}.{WARPIPE_VERSION_MINOR}.");
        assert!(env!("CARGO_PKG_VERSION").starts_with(&version));
    }
}
