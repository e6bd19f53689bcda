//! A process that loads the fake driver in place of the driver.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Output;

use warpipe_testkit::{TempDir, temporary_folder, this_program};

/// Names the case to the child.
pub const CASE: &str = "FAKE_CUDA_CASE";
/// The variable that makes a test program a child.
pub const CHILD: [&str; 4] = ["--exact", "child", "--ignored", "--nocapture"];
const LIBRARY: &str = "libcuda.so.1";

/// A folder with the fake driver under the driver's name, and the environment of a child.
pub struct FakeDriver {
    folder: TempDir,
    environment: Vec<(&'static str, String)>,
}

impl FakeDriver {
    pub fn new() -> FakeDriver {
        let folder = temporary_folder().unwrap();
        std::fs::copy(built_library(), folder.path().join(LIBRARY)).unwrap();
        FakeDriver {
            folder,
            environment: Vec::new(),
        }
    }

    pub fn env(mut self, name: &'static str, value: &str) -> FakeDriver {
        self.environment.push((name, value.to_owned()));
        self
    }

    /// Removes a function's name from the library, so that a lookup does not find it.
    pub fn without(self, function: &str) -> FakeDriver {
        let path = self.folder.path().join(LIBRARY);
        let mut bytes = std::fs::read(&path).unwrap();
        let name: Vec<u8> = [&[0], function.as_bytes(), &[0]].concat();
        let places: Vec<usize> = bytes
            .windows(name.len())
            .enumerate()
            .filter(|(_, window)| *window == name)
            .map(|(place, _)| place)
            .collect();
        assert!(!places.is_empty(), "the library has no {function}");
        for place in places {
            bytes[place + 1] = b'x';
        }
        std::fs::write(path, bytes).unwrap();
        self
    }

    /// Puts a file that is no library under both of the driver's names.
    pub fn broken(self) -> FakeDriver {
        for name in [LIBRARY, "libcuda.so"] {
            std::fs::write(self.folder.path().join(name), "this is no library").unwrap();
        }
        self
    }

    pub fn run(self, case: &str) {
        let output = self.start(case);
        let text = String::from_utf8_lossy(&output.stdout);
        let passed = output.status.success() && text.contains("1 passed");
        assert!(
            passed,
            "{case} with {:?}: {}\n{text}{}",
            self.environment,
            output.status,
            errors(&output)
        );
    }

    /// Returns its output.
    pub fn dies_by(self, signal: i32, case: &str) -> String {
        let output = self.start(case);
        assert_eq!(
            output.status.signal(),
            Some(signal),
            "{case}: {}\n{}",
            output.status,
            errors(&output)
        );
        errors(&output)
    }

    /// For a case that ends the process itself. Returns its output.
    pub fn ends_with(self, code: i32, case: &str) -> String {
        let output = self.start(case);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{case}: {}\n{}",
            output.status,
            errors(&output)
        );
        errors(&output)
    }

    fn start(&self, case: &str) -> Output {
        let mut command = this_program();
        command.args(CHILD);
        command
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env(CASE, case);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.output().unwrap()
    }
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The library of this package, which Cargo builds beside its tests.
fn built_library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let places = test
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("libfake_cuda.so"));
    places
        .into_iter()
        .find(|path| Path::exists(path))
        .expect("libfake_cuda.so beside the test")
}
