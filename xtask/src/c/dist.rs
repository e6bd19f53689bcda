//! The install tree of the C interface: libraries, headers, pkg-config and CMake packages.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::Outcome;
use crate::process::Task;
use crate::workspace::{Workspace, cargo};

const BUILD_LIMIT: Duration = Duration::from_secs(1800);
const CRATE: &str = "crates/warpipe-c";

/// What a program needs beside the static library: the libraries of Rust's standard library, and
/// that `dlclose` does not unmap the code that threads run.
pub(super) const PRIVATE_LIBRARIES: &str =
    "-Wl,-z,nodelete -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

/// A build of the libraries.
pub struct Build<'a> {
    /// The cargo profile.
    pub profile: &'a str,
    /// The folder of that profile below the target folder.
    pub folder: &'a str,
}

/// What users install.
pub const RELEASE: Build<'static> = Build {
    profile: "bundle",
    folder: "bundle",
};
/// For the tests.
const DEBUG: Build<'static> = Build {
    profile: "dev",
    folder: "debug",
};

/// The version, and the part of it that names the binary interface.
struct Version {
    whole: String,
    abi: String,
}

impl Version {
    fn find() -> Version {
        let whole = env!("CARGO_PKG_VERSION");
        let parts: Vec<&str> = whole.split('.').collect();
        let abi = match parts.as_slice() {
            ["0", minor, ..] => format!("0.{minor}"),
            [major, ..] => (*major).to_string(),
            [] => String::new(),
        };
        Version {
            whole: whole.into(),
            abi,
        }
    }
}

/// The tree that tests and examples are built against.
pub fn for_tests(workspace: &Workspace) -> Outcome<PathBuf> {
    let place = workspace.target.join("c-tests/tree");
    match workspace.has_tests {
        true => fill(workspace, &DEBUG, &place),
        false => lay_out(workspace, &DEBUG, &place),
    }
}

/// Builds the libraries and lays the tree out at `place`, which it replaces. Returns its path.
pub fn lay_out(workspace: &Workspace, build: &Build, place: &Path) -> Outcome<PathBuf> {
    let task = Task::new(cargo()).args(["build", "-p", "warpipe-c", "--profile", build.profile]);
    if !task.run(&workspace.root, BUILD_LIMIT)?.success {
        return Err("the C libraries do not compile".into());
    }
    fill(workspace, build, place)
}

/// Lays the tree out with libraries that are built.
fn fill(workspace: &Workspace, build: &Build, place: &Path) -> Outcome<PathBuf> {
    let version = Version::find();
    let _ = fs::remove_dir_all(place);
    let tree = Tree {
        root: place.to_path_buf(),
    };
    let built = workspace.target.join(build.folder);
    let whole = format!("libwarpipe.so.{}", version.whole);
    let named = format!("libwarpipe.so.{}", version.abi);
    tree.copy(&built.join("libwarpipe_c.so"), &format!("lib/{whole}"))?;
    tree.copy(&built.join("libwarpipe_c.a"), "lib/libwarpipe.a")?;
    tree.link(&whole, &format!("lib/{named}"))?;
    tree.link(&named, "lib/libwarpipe.so")?;
    for header in ["warpipe.h", "warpipe.hpp"] {
        let from = workspace.root.join(CRATE).join("include").join(header);
        tree.copy(&from, &format!("include/{header}"))?;
    }
    tree.write("lib/pkgconfig/warpipe.pc", &pkg_config(&version))?;
    let cmake = "lib/cmake/warpipe";
    tree.write(
        &format!("{cmake}/warpipe-config.cmake"),
        &cmake_config(&version),
    )?;
    tree.write(
        &format!("{cmake}/warpipe-config-version.cmake"),
        &cmake_version(&version),
    )?;
    for license in ["LICENSE-MIT", "LICENSE-APACHE"] {
        tree.copy(
            &workspace.root.join(license),
            &format!("share/doc/warpipe/{license}"),
        )?;
    }
    Ok(tree.root)
}

/// A folder that is being filled.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn place(&self, path: &str) -> Outcome<PathBuf> {
        let place = self.root.join(path);
        let folder = place.parent().unwrap_or(&self.root);
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(place)
    }

    fn copy(&self, from: &Path, to: &str) -> Outcome<()> {
        let place = self.place(to)?;
        fs::copy(from, &place)
            .map(|_| ())
            .map_err(|error| format!("{} to {}: {error}", from.display(), place.display()))
    }

    fn link(&self, to: &str, at: &str) -> Outcome<()> {
        let place = self.place(at)?;
        symlink(to, &place).map_err(|error| format!("{}: {error}", place.display()))
    }

    fn write(&self, at: &str, text: &str) -> Outcome<()> {
        let place = self.place(at)?;
        fs::write(&place, text).map_err(|error| format!("{}: {error}", place.display()))
    }
}

/// Relative to the file itself, so that the tree may be moved.
fn pkg_config(version: &Version) -> String {
    format!(
        "prefix=${{pcfiledir}}/../..\n\
         libdir=${{prefix}}/lib\n\
         includedir=${{prefix}}/include\n\
         \n\
         Name: warpipe\n\
         Description: GPU memory and streams of tensors handed between processes without a copy\n\
         Version: {}\n\
         Libs: -L${{libdir}} -lwarpipe\n\
         Libs.private: {PRIVATE_LIBRARIES}\n\
         Cflags: -I${{includedir}}\n",
        version.whole
    )
}

fn cmake_config(version: &Version) -> String {
    let libraries: Vec<&str> = PRIVATE_LIBRARIES
        .split(' ')
        .map(|library| library.trim_start_matches("-l"))
        .collect();
    format!(
        r#"# Targets: warpipe::warpipe (shared), warpipe::static.
get_filename_component(_warpipe_prefix "${{CMAKE_CURRENT_LIST_DIR}}/../../.." ABSOLUTE)

if(NOT TARGET warpipe::warpipe)
  add_library(warpipe::warpipe SHARED IMPORTED)
  set_target_properties(warpipe::warpipe PROPERTIES
    IMPORTED_LOCATION "${{_warpipe_prefix}}/lib/libwarpipe.so.{whole}"
    IMPORTED_SONAME "libwarpipe.so.{abi}"
    INTERFACE_INCLUDE_DIRECTORIES "${{_warpipe_prefix}}/include")
endif()

if(NOT TARGET warpipe::static)
  add_library(warpipe::static STATIC IMPORTED)
  set_target_properties(warpipe::static PROPERTIES
    IMPORTED_LOCATION "${{_warpipe_prefix}}/lib/libwarpipe.a"
    INTERFACE_INCLUDE_DIRECTORIES "${{_warpipe_prefix}}/include"
    INTERFACE_LINK_LIBRARIES "{libraries}")
endif()

unset(_warpipe_prefix)
"#,
        whole = version.whole,
        abi = version.abi,
        libraries = libraries.join(";"),
    )
}

/// A request fits if it is not newer, and of one binary interface.
fn cmake_version(version: &Version) -> String {
    format!(
        r#"set(PACKAGE_VERSION "{whole}")
set(PACKAGE_VERSION_COMPATIBLE FALSE)
set(PACKAGE_VERSION_EXACT FALSE)
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
if("${{PACKAGE_FIND_VERSION}}." MATCHES "^{abi}\\." AND
   NOT PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
"#,
        whole = version.whole,
        abi = version.abi.replace('.', "\\\\."),
    )
}
