//! Damaged files and folders.

use std::fs;
use std::os::unix::fs::symlink;

use super::index::INDEX_BYTES_MAX;
use super::*;

const INDEX: &str = "model.safetensors.index.json";

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
        names_of(&self.0)
    }

    fn refused(&self) -> String {
        let error = Source::open([&self.0]).unwrap_err();
        assert!(error.hint().is_some(), "{error}");
        error.to_string()
    }
}

fn names_of(path: &Path) -> Vec<String> {
    let source = Source::open([path]).unwrap();
    let mut names: Vec<_> = source.tensors.into_iter().map(|t| t.tensor.name).collect();
    names.sort();
    names
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_only_model_of_a_folder_is_read_whatever_its_name() {
    for (file, tensor) in [
        ("model.safetensors", "single"),
        ("consolidated.safetensors", "a"),
        ("consolidated.00.safetensors", "a"),
        ("diffusion_pytorch_model.safetensors", "a"),
        ("adapter_model.safetensors", "a"),
        ("model.fp16.safetensors", "a"),
    ] {
        let folder = Folder::new("only");
        folder.file(file, &[tensor]);
        fs::write(folder.0.join("config.json"), "{}").unwrap();
        fs::write(folder.0.join("._model.safetensors"), "of another system").unwrap();
        assert_eq!(folder.names(), [tensor], "{file}");
    }
}

#[test]
fn an_index_of_any_name_is_read_with_its_files_also_those_of_subfolders() {
    for index in [
        INDEX,
        "diffusion_pytorch_model.safetensors.index.json",
        "model.safetensors.index.fp16.json",
        "consolidated.safetensors.index.json",
    ] {
        let folder = Folder::new("index-name");
        fs::create_dir(folder.0.join("shards")).unwrap();
        folder.file("one-00001-of-00002.safetensors", &["a", "b"]);
        folder.file("shards/two.safetensors", &["c"]);
        folder.index(
            r#""a":"one-00001-of-00002.safetensors","b":"./one-00001-of-00002.safetensors",
               "c":"shards/two.safetensors""#,
        );
        if index != INDEX {
            fs::rename(folder.0.join(INDEX), folder.0.join(index)).unwrap();
        }
        assert_eq!(folder.names(), ["a", "b", "c"], "{index}");
    }
}

#[test]
fn a_folder_of_several_models_is_refused_with_their_names_and_each_is_read_by_its_path() {
    let folder = Folder::new("several");
    folder.file("model-00001-of-00001.safetensors", &["a"]);
    folder.index(r#""a":"model-00001-of-00001.safetensors""#);
    folder.file("model.fp16.safetensors", &["b"]);
    folder.file("consolidated.safetensors", &["c"]);
    let refused = folder.refused();
    for name in ["consolidated.safetensors", "model.fp16.safetensors", INDEX] {
        assert!(refused.contains(name), "{name}: {refused}");
    }
    assert!(!refused.contains("00001"), "the index names it: {refused}");
    assert_eq!(names_of(&folder.0.join(INDEX)), ["a"]);
    assert_eq!(names_of(&folder.0.join("model.fp16.safetensors")), ["b"]);
    // A second index.
    fs::copy(
        folder.0.join(INDEX),
        folder.0.join("other.safetensors.index.json"),
    )
    .unwrap();
    let refused = folder.refused();
    assert!(
        refused.contains("other.safetensors.index.json"),
        "{refused}"
    );
}

#[test]
fn a_folder_without_weights_and_files_of_an_index_that_is_missing_are_refused_by_name() {
    let folder = Folder::new("none");
    assert!(folder.refused().contains("no safetensors file"));
    folder.file("model-00001-of-00002.safetensors", &["a"]);
    let refused = folder.refused();
    let (name, words) = ("model-00001-of-00002.safetensors", "index");
    assert!(
        refused.contains(name) && refused.contains(words),
        "{refused}"
    );
}

#[test]
fn an_index_that_leads_nowhere_is_an_error_and_no_file_beside_it_takes_its_place() {
    for target in ["gone.json", INDEX] {
        let folder = Folder::new("dangling");
        folder.file("model.safetensors", &["stray"]);
        symlink(target, folder.0.join(INDEX)).unwrap();
        let refused = Source::open([&folder.0]).unwrap_err();
        assert!(
            matches!(&refused, Error::Os { call: "open", context, .. } if context.contains(INDEX)),
            "{target}: {refused}"
        );
    }
}

#[test]
fn an_index_decides_which_tensors_of_its_files_are_read() {
    let folder = Folder::new("index");
    folder.file("one.safetensors", &["a", "b", "extra"]);
    folder.file("two.safetensors", &["b", "c"]);
    folder.index(r#""a":"one.safetensors","b":"two.safetensors","c":"two.safetensors""#);
    assert_eq!(folder.names(), ["a", "b", "c"]);
    let source = Source::open([&folder.0]).unwrap();
    let of_b = source.tensors.iter().find(|it| it.tensor.name == "b");
    assert!(
        source.files[of_b.unwrap().file]
            .path
            .ends_with("two.safetensors")
    );
}

#[test]
fn an_index_that_does_not_fit_its_files_is_refused_with_the_tensors_name() {
    let folder = Folder::new("unfit");
    folder.file("one.safetensors", &["a", "b"]);
    for (map, wanted) in [
        (
            r#""a":"one.safetensors","b":"one.safetensors","c":"one.safetensors""#,
            r#"has tensor "c" in "one.safetensors", which lacks it"#,
        ),
        (
            r#""a":"one.safetensors","a":"one.safetensors""#,
            r#"tensor "a" is named twice"#,
        ),
        (r#""a":"../one.safetensors""#, "not in its folder"),
        (r#""a":"x/../../one.safetensors""#, "not in its folder"),
        (r#""a":"/etc/passwd""#, "not in its folder"),
        (r#""a":"..""#, "not in its folder"),
        (r#""a":"""#, "not in its folder"),
        (r#""a":".""#, "not in its folder"),
        (r#""a":7"#, "garbled"),
    ] {
        folder.index(map);
        let refused = folder.refused();
        assert!(refused.contains(wanted), "{refused}");
    }
    folder.index(r#""a":"gone.safetensors","b":"one.safetensors""#);
    assert!(matches!(Source::open([&folder.0]), Err(Error::Os { .. })));
    fs::write(folder.0.join(INDEX), "{").unwrap();
    assert!(folder.refused().contains("garbled"));
}

#[test]
fn a_limit_is_told_as_a_limit_and_not_as_damage() {
    let folder = Folder::new("limit");
    let is_limit = |found: Result<Source>| match found.unwrap_err() {
        error @ Error::Weights(WeightsFault::File { .. }) => {
            let hint = error.hint().unwrap_or_default();
            assert!(hint.contains("several names"), "{error}; {hint}");
            error.to_string()
        }
        other => panic!("{other}"),
    };
    let map: Vec<_> = (0..=TENSORS_MAX)
        .map(|at| format!(r#""{at}":"f""#))
        .collect();
    folder.index(&map.join(","));
    let told = is_limit(Source::open([&folder.0]));
    assert!(told.contains("tensors: more than"), "{told}");
    let index = fs::File::options().write(true).open(folder.0.join(INDEX));
    index.unwrap().set_len(INDEX_BYTES_MAX + 1).unwrap();
    let told = is_limit(Source::open([&folder.0]));
    assert!(told.contains("bytes of the index: more than"), "{told}");
}

#[test]
fn a_checkpoint_of_tens_of_thousands_of_tensors_in_a_hundred_files_is_read() {
    const SHARDS: usize = 96;
    const TENSORS: usize = 49_440;
    let folder = Folder::new("large");
    let (mut map, mut at) = (Vec::new(), 0);
    for shard in 0..SHARDS {
        let file = format!("model-{:05}-of-{SHARDS:05}.safetensors", shard + 1);
        let names: Vec<_> = (at..at + TENSORS / SHARDS)
            .map(|at| format!("model.layers.{}.mlp.experts.{at}.weight_scale_inv", at % 60))
            .collect();
        at += names.len();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        folder.file(&file, &names);
        map.extend(names.iter().map(|name| format!(r#""{name}":"{file}""#)));
    }
    folder.index(&map.join(","));
    let source = Source::open([&folder.0]).unwrap();
    assert_eq!(
        (source.tensors.len(), source.files.len()),
        (TENSORS, SHARDS)
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
fn an_index_that_names_no_tensor_is_refused_and_offers_no_empty_model() {
    let folder = Folder::new("none");
    folder.index("");
    let refused = folder.refused();
    assert!(refused.contains("the index names no tensor"), "{refused}");
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
            matches!(refused, Error::Weights(WeightsFault::File { .. })),
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
            matches!(&refused, Error::Weights(WeightsFault::File { fault, .. })
                if fault.text.starts_with("it is neither")),
            "{refused}"
        );
    }
    // A cache of models has links to its files.
    let file = folder.file("file", &["a"]);
    symlink(&file, folder.0.join("model.safetensors")).unwrap();
    assert_eq!(folder.names(), ["a"]);
}

#[test]
fn a_file_that_is_replaced_while_others_are_opened_is_refused() {
    let folder = Folder::new("replaced");
    let (one, two) = (folder.file("one", &["a"]), folder.file("two", &["b"]));
    let source = Source::open([&one, &two]).unwrap();
    source.check_paths().unwrap();
    let other = folder.file("other", &["b"]);
    fs::rename(other, &two).unwrap();
    let refused = source.check_paths().unwrap_err().to_string();
    assert!(refused.contains("two cannot be loaded"), "{refused}");
    assert!(refused.contains("changed"), "{refused}");
}
