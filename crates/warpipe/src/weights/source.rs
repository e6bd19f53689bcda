//! The files that weights are loaded from, opened and checked.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};

use super::manifest::{TENSORS_MAX, read_exact};
use super::safetensors::{self, FileTensor, Index, LENGTH_BYTES};
use crate::error::{Error, Result, WeightsFault};
use crate::fork::CloseOnForkFd;
use crate::memory::slice::zeroed;
use crate::os::above_standard;

/// The most files under one name, each of which takes a descriptor.
const FILES_MAX: usize = 1024;

/// The longest index of a folder.
const INDEX_BYTES_MAX: u64 = 64 << 20;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// Safetensors files, opened, with every header read and checked. No tensor has been read yet.
///
/// ```
/// # let folder = std::env::temp_dir().join(format!("warpipe-source-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// # let path = folder.join("model.safetensors");
/// let header = br#"{"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
/// let mut file = (header.len() as u64).to_le_bytes().to_vec();
/// file.extend_from_slice(header);
/// file.extend_from_slice(&[0; 8]);
/// std::fs::write(&path, file)?;
///
/// let source = warpipe::weights::Source::open([&path])?;
/// assert_eq!((source.tensor_count(), source.bytes()), (1, 8));
/// # std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Source {
    pub(super) files: Vec<SourceFile>,
    pub(super) tensors: Vec<SourceTensor>,
}

#[derive(Debug)]
pub(super) struct SourceFile {
    pub(super) path: PathBuf,
    pub(super) fd: CloseOnForkFd,
}

#[derive(Debug)]
pub(super) struct SourceTensor {
    /// Its index in `files`.
    pub(super) file: usize,
    pub(super) tensor: FileTensor,
}

impl Source {
    /// Opens safetensors files, or folders as Hugging Face lays them out: with
    /// `model.safetensors.index.json` and the files that it names, or with `model.safetensors`.
    /// Reads their headers alone.
    ///
    /// # Errors
    /// [`Error::WeightsFile`] for a file that is damaged, truncated or no safetensors file, a
    /// tensor of two files, and an index that does not fit its files; [`Error::Os`] for a file that
    /// cannot be read; [`Error::DescriptorLimit`]; [`Error::DeviceMemory`] when this process has no
    /// room for a header.
    pub fn open<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<Source> {
        let mut source = Source {
            files: Vec::new(),
            tensors: Vec::new(),
        };
        for path in paths {
            source.add(path.as_ref())?;
        }
        source.check_names()?;
        Ok(source)
    }

    /// The number of tensors.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// The tensors' bytes.
    pub fn bytes(&self) -> u64 {
        let bytes = self
            .tensors
            .iter()
            .map(|tensor| tensor.tensor.layout.bytes());
        bytes.fold(0, u64::saturating_add)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let is_folder = std::fs::metadata(path)
            .map_err(|e| Error::os("stat", path.display().to_string(), e))?
            .is_dir();
        if !is_folder {
            return self.add_file(path);
        }
        let index = path.join(INDEX);
        if index.exists() {
            return self.add_index(path, &index);
        }
        let single = path.join(SINGLE);
        if single.exists() {
            return self.add_file(&single);
        }
        Err(of_file(path, WeightsFault::Empty))
    }

    fn add_file(&mut self, path: &Path) -> Result<()> {
        let limit = |what, limit: usize| {
            let limit = limit as u64;
            of_file(path, WeightsFault::Limit { what, limit })
        };
        if self.files.len() == FILES_MAX {
            return Err(limit("files", FILES_MAX));
        }
        let (fd, file_bytes) = open_regular(path)?;
        let tensors = read_header(fd.as_fd(), file_bytes, path)?;
        if self.tensors.len() + tensors.len() > TENSORS_MAX {
            return Err(limit("tensors", TENSORS_MAX));
        }
        let file = self.files.len();
        let path = path.to_owned();
        self.files.push(SourceFile { path, fd });
        let tensors = tensors.into_iter();
        self.tensors
            .extend(tensors.map(|tensor| SourceTensor { file, tensor }));
        Ok(())
    }

    /// Adds the files that an index names. Each must hold exactly the tensors that the index says.
    fn add_index(&mut self, folder: &Path, path: &Path) -> Result<()> {
        let fault = |text: String| of_file(path, WeightsFault::Index(text));
        let (fd, file_bytes) = open_regular(path)?;
        if file_bytes > INDEX_BYTES_MAX {
            return Err(fault(format!("is longer than {INDEX_BYTES_MAX} bytes")));
        }
        let mut text = zeroed(file_bytes)?;
        read_exact(fd.as_fd(), &mut text, 0).map_err(|error| unreadable(path, error))?;
        let index: Index = serde_json::from_slice(&text).map_err(|error| {
            let error = safetensors::shortened(&error.to_string());
            fault(format!("is garbled: {error}"))
        })?;
        let map: HashMap<&str, &str> = index
            .weight_map
            .0
            .iter()
            .map(|(tensor, file)| (tensor.as_str(), file.as_str()))
            .collect();
        let mut files: Vec<&str> = map.values().copied().collect();
        files.sort_unstable();
        files.dedup();
        let first = self.tensors.len();
        for file in files {
            // An index may come from anywhere: it must not name files elsewhere.
            let mut parts = Path::new(file).components();
            if !matches!(
                (parts.next(), parts.next()),
                (Some(Component::Normal(_)), None)
            ) {
                let file = safetensors::shortened(file);
                return Err(fault(format!(
                    "names {file:?}, which is no file of its folder"
                )));
            }
            let before = self.tensors.len();
            self.add_file(&folder.join(file))?;
            for SourceTensor { tensor, .. } in &self.tensors[before..] {
                let name = &tensor.name;
                match map.get(name.as_str()) {
                    Some(&named) if named == file => {}
                    Some(named) => {
                        let named = safetensors::shortened(named);
                        return Err(fault(format!(
                            "has tensor {name:?} in {named:?}, and it lies in {file:?}"
                        )));
                    }
                    None => {
                        return Err(fault(format!("does not name tensor {name:?} of {file:?}")));
                    }
                }
            }
        }
        if self.tensors.len() - first < map.len() {
            let found: HashMap<&str, ()> = self.tensors[first..]
                .iter()
                .map(|tensor| (tensor.tensor.name.as_str(), ()))
                .collect();
            if let Some((name, file)) = map.iter().find(|(name, _)| !found.contains_key(*name)) {
                let (name, file) = (safetensors::shortened(name), safetensors::shortened(file));
                return Err(fault(format!(
                    "has tensor {name:?} in {file:?}, which lacks it"
                )));
            }
        }
        Ok(())
    }

    /// Checks that no two files hold a tensor of the same name.
    fn check_names(&self) -> Result<()> {
        let mut files = HashMap::with_capacity(self.tensors.len());
        for SourceTensor { file, tensor } in &self.tensors {
            if let Some(other) = files.insert(tensor.name.as_str(), *file) {
                let fault = WeightsFault::Duplicate {
                    name: tensor.name.clone(),
                    other: self.files[other].path.clone(),
                };
                return Err(of_file(&self.files[*file].path, fault));
            }
        }
        Ok(())
    }
}

pub(super) fn of_file(path: &Path, fault: WeightsFault) -> Error {
    Error::WeightsFile {
        path: path.to_owned(),
        fault,
    }
}

/// The error of a read: the file has become shorter, or the system refuses.
pub(super) fn unreadable(path: &Path, error: std::io::Error) -> Error {
    if error.kind() == std::io::ErrorKind::UnexpectedEof {
        of_file(path, WeightsFault::Changed)
    } else {
        Error::os("pread", path.display().to_string(), error)
    }
}

/// Opens a regular file, and returns it with its length. Does not wait for the writer of a FIFO.
fn open_regular(path: &Path) -> Result<(CloseOnForkFd, u64)> {
    let failed = |call| move |e| Error::os(call, path.display().to_string(), e);
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened: OwnedFd = rustix::fs::open(path, flags, Mode::empty())
        .and_then(above_standard)
        .map_err(failed("open"))?;
    let fd = CloseOnForkFd::new(opened).map_err(failed("open"))?;
    let stat = rustix::fs::fstat(&fd).map_err(failed("fstat"))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(of_file(path, WeightsFault::NotRegular));
    }
    Ok((fd, stat.st_size as u64))
}

/// Reads and checks the header of a file of `file_bytes` bytes.
fn read_header(
    fd: std::os::fd::BorrowedFd<'_>,
    file_bytes: u64,
    path: &Path,
) -> Result<Vec<FileTensor>> {
    let fault = |fault| of_file(path, fault);
    let mut first = [0; LENGTH_BYTES as usize];
    if file_bytes < LENGTH_BYTES {
        return Err(fault(WeightsFault::Truncated {
            found: file_bytes,
            described: LENGTH_BYTES,
        }));
    }
    read_exact(fd, &mut first, 0).map_err(|error| unreadable(path, error))?;
    let header_bytes = safetensors::header_bytes(first, file_bytes).map_err(fault)?;
    let mut header = zeroed(header_bytes)?;
    read_exact(fd, &mut header, LENGTH_BYTES).map_err(|error| unreadable(path, error))?;
    let data_bytes = file_bytes - LENGTH_BYTES - header_bytes;
    safetensors::parse(&header, data_bytes).map_err(fault)
}

#[cfg(test)]
mod tests;
