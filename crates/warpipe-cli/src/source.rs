//! Files as tensors: what `warpipe pub` reads.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use warpipe::{DType, Layout};

use crate::{image, npy};

/// The most metadata that goes with a sample, in bytes.
pub const METADATA_BYTES_MAX: usize = 256;

/// A file that cannot be published, and why.
#[derive(Debug, thiserror::Error)]
#[error("{}: {fault}", path.display())]
pub struct InputError {
    path: PathBuf,
    fault: Fault,
}

impl InputError {
    /// A file that the system does not open or read.
    pub fn unreadable(path: impl Into<PathBuf>, error: io::Error) -> InputError {
        InputError {
            path: path.into(),
            fault: Fault::Io(error),
        }
    }
}

/// A fault of a file.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// As a NumPy array.
    #[error("not a usable .npy file: {0}")]
    Npy(#[from] npy::Fault),
    /// As plain bytes.
    #[error("{0}")]
    Raw(npy::Fault),
    /// As a picture.
    #[error("not a usable .png file: {0}")]
    Png(#[from] image::Fault),
    /// Directories, pipes, devices.
    #[error("it is not a regular file; give the files inside it, one by one")]
    NotAFile,
    /// It cannot be opened or read.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// How a file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A NumPy array.
    Npy,
    /// A picture.
    Png,
    /// Bytes.
    Raw,
}

/// A sample's metadata about the file that it came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The file's name, without its directory.
    pub file: String,
    /// How it was read.
    pub kind: Kind,
}

/// A file to be published.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    kind: Kind,
    void_as: Option<DType>,
}

/// One file's tensor.
#[derive(Debug)]
pub struct Item {
    /// Element type, shape, strides.
    pub layout: Layout,
    /// Its bytes, as they lie in the slot.
    pub data: Vec<u8>,
}

impl Source {
    /// A file by its path; the extension says how to read it, unless `raw`.
    pub fn new(path: &Path, raw: bool, void_as: Option<DType>) -> Source {
        let extension = path
            .extension()
            .map(|extension| extension.to_string_lossy().to_lowercase());
        let kind = match extension.as_deref() {
            Some("npy") if !raw => Kind::Npy,
            Some("png") if !raw => Kind::Png,
            _ => Kind::Raw,
        };
        Source {
            path: path.to_owned(),
            kind,
            void_as,
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes sure that the file can be published, without keeping its data. A picture is decoded
    /// whole.
    pub fn check(&self) -> Result<Layout, InputError> {
        Ok(self.read(false)?.layout)
    }

    /// Reads the file whole.
    pub fn load(&self) -> Result<Item, InputError> {
        self.read(true)
    }

    /// The metadata of the sample: JSON of at most [`METADATA_BYTES_MAX`] bytes. A name too long is
    /// cut.
    pub fn metadata(&self) -> Vec<u8> {
        let mut file = self
            .path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        loop {
            let origin = Origin {
                file: file.clone(),
                kind: self.kind,
            };
            let json = serde_json::to_vec(&origin).unwrap_or_default();
            if json.len() <= METADATA_BYTES_MAX || file.pop().is_none() {
                return json;
            }
        }
    }

    /// `with_data`: else the data may be left out.
    fn read(&self, with_data: bool) -> Result<Item, InputError> {
        self.read_item(with_data).map_err(|fault| InputError {
            path: self.path.clone(),
            fault,
        })
    }

    fn read_item(&self, with_data: bool) -> Result<Item, Fault> {
        // Opening a pipe for reading would wait for its writer: look before.
        if !std::fs::metadata(&self.path)?.is_file() {
            return Err(Fault::NotAFile);
        }
        let file = File::open(&self.path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(Fault::NotAFile);
        }
        let (mut reader, length) = (BufReader::new(file), metadata.len());
        let mut data = Vec::new();
        let layout = match self.kind {
            Kind::Npy => {
                let header = npy::read_header(&mut reader, length, self.void_as)?;
                if with_data {
                    data = npy::read_data(&mut reader, &header)?;
                }
                header.layout
            }
            Kind::Png => {
                let (layout, pixels) = image::read(reader, length)?;
                data = pixels;
                layout
            }
            Kind::Raw => {
                if with_data {
                    data = npy::read_exactly(&mut reader, length).map_err(Fault::Raw)?;
                }
                bytes_layout(length)?
            }
        };
        Ok(Item { layout, data })
    }
}

fn bytes_layout(length: u64) -> Result<Layout, npy::Fault> {
    Layout::bytes_only(length).map_err(|error| npy::Fault::Shape(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extension_says_how_a_file_is_read() {
        for (path, kind) in [
            ("a.npy", Kind::Npy),
            ("a.NPY", Kind::Npy),
            ("b.c.png", Kind::Png),
            ("npy", Kind::Raw),
            ("x.bin", Kind::Raw),
            (".png", Kind::Raw),
        ] {
            assert_eq!(
                Source::new(Path::new(path), false, None).kind,
                kind,
                "{path}"
            );
        }
        assert_eq!(Source::new(Path::new("a.npy"), true, None).kind, Kind::Raw);
    }

    #[test]
    fn metadata_fits_whatever_the_name_is() {
        for name in [
            "x".repeat(255),
            "\"".repeat(200),
            "\u{1}".repeat(200),
            "ü".repeat(127),
        ] {
            let metadata = Source::new(Path::new(&format!("/dir/{name}")), false, None).metadata();
            assert!(metadata.len() <= METADATA_BYTES_MAX);
            let origin: Origin = serde_json::from_slice(&metadata).unwrap();
            assert!(!origin.file.is_empty() && name.starts_with(&origin.file));
        }
    }

    #[test]
    fn a_directory_and_a_missing_file_are_no_input() {
        let directory = tempfile::tempdir().unwrap();
        let error = Source::new(directory.path(), false, None)
            .load()
            .unwrap_err();
        assert!(matches!(error.fault, Fault::NotAFile), "{error}");
        let error = Source::new(&directory.path().join("none.npy"), false, None)
            .check()
            .unwrap_err();
        assert!(
            matches!(error.fault, Fault::Io(_)) && error.to_string().contains("none.npy"),
            "{error}"
        );
    }
}
