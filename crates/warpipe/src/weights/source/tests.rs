//! Damaged files and folders.

use std::fs;
use std::os::unix::fs::symlink;

use super::*;

struct Folder(PathBuf);

impl Folder {
    fn new(title: &str) -> Folder {
        let id = std::process::id();
        let path = std::env::temp_dir().join(format!("warpipe-source-{title}-{id}"));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// A file with one tensor of each name, of 4 bytes.
    fn file(&self, file: &str, tensors: &[&str]) -> PathBuf {
        let entry = |(index, name): (usize, &&str)| {
            let (begin, end) = (4 * index, 4 * index + 4);
            format!(r#""{name}":{{"dtype":"F32","shape":[1],"data_offsets":[{begin},{end}]}}"#)
        };
        let entries: Vec<_> = tensors.iter().enumerate().map(entry).collect();
        let header = format!("{{{}}}", entries.join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend(tensors.iter().flat_map(|name| [name.len() as u8; 4]));
        let path = self.0.join(file);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn index(&self, map: &str) {
        let text = format!(r#"{{"metadata":{{"total_size":8}},"weight_map":{{{map}}}}}"#);
        fs::write(self.0.join(INDEX), text).unwrap();
    }

    fn names(&self) -> Vec<String> {
        let source = Source::open([&self.0]).unwrap();
        let mut names: Vec<_> = source.tensors.into_iter().map(|t| t.tensor.name).collect();
        names.sort();
        names
    }

    fn refused(&self) -> String {
        let error = Source::open([&self.0]).unwrap_err();
        assert!(error.hint().is_some(), "{error}");
        error.to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_folder_is_read_by_its_index_and_without_one_by_its_only_file() {
    let folder = Folder::new("folder");
    assert!(
        folder
            .refused()
            .contains("neither model.safetensors.index.json")
    );
    folder.file("model.safetensors", &["single"]);
    assert_eq!(folder.names(), ["single"]);
    folder.file("one.safetensors", &["a", "b"]);
    folder.file("two.safetensors", &["c"]);
    folder.index(r#""a":"one.safetensors","b":"one.safetensors","c":"two.safetensors""#);
    assert_eq!(folder.names(), ["a", "b", "c"]);
}

#[test]
fn an_index_that_does_not_fit_its_files_is_refused_with_the_tensors_name() {
    let folder = Folder::new("index");
    folder.file("one.safetensors", &["a", "b"]);
    for (map, wanted) in [
        (r#""a":"one.safetensors""#, r#"does not name tensor "b""#),
        (
            r#""a":"one.safetensors","b":"one.safetensors","c":"one.safetensors""#,
            r#"has tensor "c" in "one.safetensors", which lacks it"#,
        ),
        (
            r#""a":"one.safetensors","a":"one.safetensors""#,
            r#"tensor "a" is named twice"#,
        ),
        (r#""a":"../one.safetensors""#, "no file of its folder"),
        (r#""a":"/etc/passwd""#, "no file of its folder"),
        (r#""a":"..""#, "no file of its folder"),
        (r#""a":"""#, "no file of its folder"),
        (r#""a":7"#, "garbled"),
    ] {
        folder.index(map);
        let refused = folder.refused();
        assert!(refused.contains(wanted), "{refused}");
    }
    folder.index(r#""a":"gone.safetensors""#);
    assert!(matches!(Source::open([&folder.0]), Err(Error::Os { .. })));
    fs::write(folder.0.join(INDEX), "{").unwrap();
    assert!(folder.refused().contains("garbled"));
    folder.file("two.safetensors", &["b"]);
    folder.index(r#""a":"one.safetensors","b":"two.safetensors""#);
    assert!(
        folder
            .refused()
            .contains(r#"has tensor "b" in "two.safetensors""#)
    );
}

#[test]
fn the_text_of_a_refused_index_is_short_however_long_its_entries_are() {
    let folder = Folder::new("long");
    let long = "n".repeat(1 << 20);
    fs::write(
        folder.0.join(INDEX),
        format!(r#"{{"weight_map":"{long}"}}"#),
    )
    .unwrap();
    let refused = folder.refused();
    assert!(refused.len() < 4096, "{} bytes", refused.len());
}

#[test]
fn a_tensor_of_two_files_is_refused_with_both_files() {
    let folder = Folder::new("twice");
    let files = [folder.file("one", &["a"]), folder.file("two", &["b", "a"])];
    let refused = Source::open(&files).unwrap_err();
    let text = refused.to_string();
    assert!(
        text.contains("two cannot be loaded: tensor \"a\" lies in"),
        "{text}"
    );
    assert!(text.ends_with("one too"), "{text}");
}

#[test]
fn a_file_that_is_cut_short_anywhere_or_longer_than_it_says_is_refused() {
    let folder = Folder::new("cut");
    let path = folder.file("whole", &["first", "second"]);
    let whole = fs::read(&path).unwrap();
    for bytes in 0..whole.len() {
        fs::write(&path, &whole[..bytes]).unwrap();
        let refused = Source::open([&path]).unwrap_err();
        assert!(
            matches!(refused, Error::WeightsFile { .. }),
            "{bytes}: {refused}"
        );
    }
    fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
    assert!(Source::open([&path]).is_err());
}

#[test]
fn a_path_that_is_no_regular_file_is_refused_without_waiting() {
    let folder = Folder::new("fifo");
    let fifo = folder.0.join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, Mode::RUSR | Mode::WUSR).unwrap();
    for path in [fifo.as_path(), Path::new("/dev/zero")] {
        let refused = Source::open([path]).unwrap_err();
        assert!(
            matches!(
                refused,
                Error::WeightsFile {
                    fault: WeightsFault::NotRegular,
                    ..
                }
            ),
            "{refused}"
        );
    }
    // A cache of models has links to its files.
    let file = folder.file("file", &["a"]);
    symlink(&file, folder.0.join(SINGLE)).unwrap();
    assert_eq!(folder.names(), ["a"]);
}
