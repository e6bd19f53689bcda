//! Where `warpipe sub --save` puts what it receives: always inside one directory, never over
//! another file.
//!
//! The file names come from a peer. Kept of a name are its last part, its letters, digits, `_`,
//! `-` and `.`, without a leading dot and at most 100 bytes long; the sample's sequence number
//! stands before it.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use warpipe::Layout;

use crate::npy;
use crate::source::{Kind, Origin};

const STEM_BYTES_MAX: usize = 100;
const SIBLINGS_MAX: u32 = 1000;

/// A directory for received samples.
#[derive(Debug)]
pub struct SaveDirectory {
    path: PathBuf,
}

impl SaveDirectory {
    /// Makes the directory if there is none.
    pub fn open(path: &Path) -> anyhow::Result<SaveDirectory> {
        std::fs::create_dir_all(path)
            .with_context(|| format!("cannot make the directory {}", path.display()))?;
        Ok(SaveDirectory {
            path: path.to_owned(),
        })
    }

    /// Saves one sample and says where: raw files as they were, all else as `.npy`.
    pub fn save(
        &self,
        sequence: u64,
        origin: Option<&Origin>,
        layout: &Layout,
        slot: &[u8],
    ) -> anyhow::Result<PathBuf> {
        let raw = origin.is_some_and(|origin| origin.kind == Kind::Raw);
        let (stem, extension) = file_name(sequence, origin);
        let (path, file) = self.create(&stem, &extension)?;
        let mut out = BufWriter::new(file);
        let written = if raw {
            out.write_all(slot)
        } else {
            npy::write(&mut out, layout, slot)
        };
        if let Err(error) = written.and_then(|()| out.flush()) {
            let _ = std::fs::remove_file(&path);
            return Err(error).with_context(|| format!("cannot save {}", path.display()));
        }
        Ok(path)
    }

    /// Opens a new file; where the name is taken, with `-2`, `-3`, ... before the extension.
    fn create(&self, stem: &str, extension: &str) -> anyhow::Result<(PathBuf, File)> {
        for sibling in 1..=SIBLINGS_MAX {
            let path = self.path.join(match sibling {
                1 => format!("{stem}{extension}"),
                _ => format!("{stem}-{sibling}{extension}"),
            });
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => return Ok((path, file)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot save {}", path.display()));
                }
            }
        }
        anyhow::bail!(
            "{} is full of files of that name; save into another directory",
            self.path.display()
        )
    }
}

/// The name of a sample's file without its extension, and the extension with its dot.
fn file_name(sequence: u64, origin: Option<&Origin>) -> (String, String) {
    let clean = origin.map_or_else(String::new, |origin| sanitize(&origin.file));
    let (stem, extension) = match clean.rsplit_once('.') {
        Some((stem, extension)) if !stem.is_empty() => (stem, format!(".{extension}")),
        _ => (clean.as_str(), String::new()),
    };
    let stem = match stem {
        "" => format!("{sequence:06}"),
        stem => format!("{sequence:06}-{stem}"),
    };
    match origin {
        Some(origin) if origin.kind == Kind::Raw => (stem, extension),
        _ => (stem, ".npy".to_owned()),
    }
}

/// The safe part of a name that a peer chose.
fn sanitize(name: &str) -> String {
    let last = name.rsplit(['/', '\\']).next().unwrap_or_default();
    let clean: String = last
        .chars()
        .map(|letter| {
            if letter.is_ascii_alphanumeric() || "_-.".contains(letter) {
                letter
            } else {
                '_'
            }
        })
        .take(STEM_BYTES_MAX)
        .collect();
    clean.trim_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use warpipe::DType;

    use super::*;

    fn origin(file: &str, kind: Kind) -> Origin {
        Origin {
            file: file.to_owned(),
            kind,
        }
    }

    #[test]
    fn whatever_name_a_peer_sends_the_file_stays_in_the_directory() {
        let directory = tempfile::tempdir().unwrap();
        let inside = directory.path().join("in");
        let save = SaveDirectory::open(&inside).unwrap();
        let layout = Layout::bytes_only(2).unwrap();
        for name in [
            "../../etc/passwd",
            "/etc/passwd",
            "..",
            ".",
            "",
            "a/../b",
            "..\\..\\b",
            ".bashrc",
            "x\0y",
            "a\nb",
            "-rf",
            "ü\u{202e}x",
            &"n".repeat(10_000),
            &format!("{}.{}", "a".repeat(90), "b".repeat(300)),
        ] {
            for kind in [Kind::Raw, Kind::Npy] {
                let path = save
                    .save(7, Some(&origin(name, kind)), &layout, b"ab")
                    .unwrap();
                assert_eq!(path.parent().unwrap(), inside, "{name:?}");
                let file = path.file_name().unwrap().to_str().unwrap();
                assert!(
                    file.starts_with("000007") && file.len() < 130,
                    "{name:?} became {file:?}"
                );
                assert!(
                    file.bytes()
                        .all(|byte| byte.is_ascii_graphic() && byte != b'/'),
                    "{file:?}"
                );
            }
        }
        assert_eq!(
            std::fs::read_dir(directory.path()).unwrap().count(),
            1,
            "nothing beside the directory"
        );
    }

    #[test]
    fn nothing_is_overwritten_not_even_through_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let save = SaveDirectory::open(directory.path()).unwrap();
        let layout = Layout::bytes_only(1).unwrap();
        let victim = directory.path().join("victim");
        std::fs::write(&victim, "whole").unwrap();
        std::os::unix::fs::symlink(&victim, directory.path().join("000001-x.bin")).unwrap();
        let x = origin("x.bin", Kind::Raw);
        let second = save.save(1, Some(&x), &layout, b"2").unwrap();
        let third = save.save(1, Some(&x), &layout, b"3").unwrap();
        assert_eq!(
            (second.file_name().unwrap(), third.file_name().unwrap()),
            ("000001-x-2.bin".as_ref(), "000001-x-3.bin".as_ref())
        );
        assert_eq!(
            (
                std::fs::read(&victim).unwrap(),
                std::fs::read(second).unwrap()
            ),
            (b"whole".to_vec(), b"2".to_vec())
        );
    }

    #[test]
    fn pictures_and_samples_without_a_name_are_saved_as_arrays() {
        let directory = tempfile::tempdir().unwrap();
        let save = SaveDirectory::open(directory.path()).unwrap();
        let layout = Layout::contiguous(DType::U8, &[1, 1, 3]).unwrap();
        let picture = save
            .save(1, Some(&origin("cat.png", Kind::Png)), &layout, b"rgb")
            .unwrap();
        let nameless = save.save(2, None, &layout, b"rgb").unwrap();
        assert!(picture.ends_with("000001-cat.npy") && nameless.ends_with("000002.npy"));
        assert!(std::fs::read(nameless).unwrap().starts_with(b"\x93NUMPY"));
    }

    #[test]
    fn a_file_that_cannot_be_written_whole_is_not_left_behind() {
        let directory = tempfile::tempdir().unwrap();
        let save = SaveDirectory::open(directory.path()).unwrap();
        let layout = Layout::bytes_only(5).unwrap();
        assert!(save.save(1, None, &layout, b"four").is_err());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
