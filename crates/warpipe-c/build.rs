//! Names the shared library for the loader: a program that was linked with one version is not
//! started with an incompatible one.

fn main() {
    let part = |name: &str| std::env::var(format!("CARGO_PKG_VERSION_{name}")).unwrap_or_default();
    let (major, minor) = (part("MAJOR"), part("MINOR"));
    let abi = if major == "0" {
        format!("{major}.{minor}")
    } else {
        major
    };
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libwarpipe.so.{abi}");
    // `dlclose` would unmap the code that this library's threads run.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
