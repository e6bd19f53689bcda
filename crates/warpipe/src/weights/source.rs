//! The files that weights are loaded from, opened and checked.

mod index;
mod stamp;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat};

use self::index::Index;
use self::stamp::FileStamp;
use super::manifest::read_exact;
use super::safetensors::TENSORS_MAX;
use super::safetensors::{self, FileTensor, LENGTH_BYTES};
use crate::backend::zeroed;
use crate::error::{Error, Result, WeightsFault, WeightsFileFault};
use crate::fork::CloseOnForkFd;
use crate::os::above_standard;

/// The most files under one name, each of which takes a descriptor.
const FILES_MAX: usize = 1024;

/// The end of the name of a file of weights.
const EXTENSION: &str = ".safetensors";

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
/// assert_eq!(source.bytes(), 8);
/// # std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Source {
    pub(super) files: Vec<SourceFile>,
    pub(super) tensors: Vec<SourceTensor>,
    indexes: Vec<(PathBuf, FileStamp)>,
}

#[derive(Debug)]
pub(super) struct SourceFile {
    pub(super) path: PathBuf,
    pub(super) fd: CloseOnForkFd,
    /// From before its first byte was read.
    stamp: FileStamp,
}

#[derive(Debug)]
pub(super) struct SourceTensor {
    /// Its index in `files`.
    pub(super) file: usize,
    pub(super) tensor: FileTensor,
}

impl Source {
    /// Opens safetensors files, indexes with the files that they name, and folders with one of
    /// both: with one index (`model.safetensors.index.json`, `NAME.safetensors.index.json`) and no
    /// other safetensors file than those that it names, or with one safetensors file of any name.
    /// An index decides which tensors of its files are loaded. Reads headers alone.
    ///
    /// # Errors
    /// [`Error::Weights`] for a file that is damaged, truncated or no safetensors file, a
    /// folder with several models or none, a tensor of two files, an index that does not fit its
    /// files, and a file that is replaced meanwhile; [`Error::Os`], also for a file that cannot
    /// be read; [`Error::Limit`] when this process has no room for a header.
    pub fn open<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<Source> {
        let mut source = Source {
            files: Vec::new(),
            tensors: Vec::new(),
            indexes: Vec::new(),
        };
        for path in paths {
            source.add(path.as_ref())?;
        }
        source.check_names()?;
        source.check_paths()?;
        Ok(source)
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
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        match () {
            () if is_folder => self.add_folder(path),
            () if Index::is_name(&name) => self.add_index(Index::read(path)?),
            () => self.add_file(path, |_| true),
        }
    }

    /// Adds the only model of a folder.
    fn add_folder(&mut self, folder: &Path) -> Result<()> {
        let (indexes, mut files) = models_of(folder)?;
        if let [only] = &indexes[..] {
            let index = Index::read(&folder.join(only))?;
            files.retain(|file| !index.names(file));
            if files.is_empty() {
                return self.add_index(index);
            }
        } else if indexes.len() > 1 {
            // Each names its parts.
            files.retain(|file| !is_part(file));
        }
        match (&indexes[..], &files[..]) {
            ([], []) => Err(of_file(
                folder,
                WeightsFileFault::unnamed("it has no safetensors file"),
            )),
            ([], [part]) if is_part(part) => {
                let text = format!(
                    "it has {part:?}, which is one of several parts, and no index that names the others"
                );
                let next = "download the folder again, or name all of its files one by one";
                Err(of_file(folder, WeightsFileFault::new(text, next)))
            }
            ([], [file]) => self.add_file(&folder.join(file), |_| true),
            _ => {
                let models = listed(&[indexes, files].concat());
                let text = format!("it has several models: {models}");
                let next = "name one of them (an index names the parts of its model), or all files of one model";
                Err(of_file(folder, WeightsFileFault::new(text, next)))
            }
        }
    }

    /// Adds the tensors of a file with names that `is_wanted`.
    fn add_file(&mut self, path: &Path, mut is_wanted: impl FnMut(&str) -> bool) -> Result<()> {
        let limit = |what, limit: usize| of_file(path, WeightsFileFault::limit(what, limit as u64));
        if self.files.len() == FILES_MAX {
            return Err(limit("files", FILES_MAX));
        }
        let (fd, stamp) = open_regular(path)?;
        let mut tensors = read_header(fd.as_fd(), stamp.bytes, path)?;
        tensors.retain(|tensor| is_wanted(&tensor.name));
        if self.tensors.len() + tensors.len() > TENSORS_MAX {
            return Err(limit("tensors", TENSORS_MAX));
        }
        let file = self.files.len();
        let path = path.to_owned();
        self.files.push(SourceFile { path, fd, stamp });
        let tensors = tensors.into_iter();
        self.tensors
            .extend(tensors.map(|tensor| SourceTensor { file, tensor }));
        Ok(())
    }

    /// Adds the tensors that an index names, from the files that it assigns them to. What else lies
    /// in those files is not loaded.
    fn add_index(&mut self, index: Index) -> Result<()> {
        let folder = index.path.parent().unwrap_or(Path::new(""));
        let mut is_found = vec![false; index.tensor_count()];
        for (file, numbers) in index.files() {
            self.add_file(&folder.join(file), |tensor| {
                let position = index.position(tensor, &numbers);
                position.map(|position| is_found[position] = true).is_some()
            })?;
        }
        if let Some(position) = is_found.iter().position(|is_found| !is_found) {
            return Err(index.lacks(position));
        }
        self.indexes.push((index.path, index.stamp));
        Ok(())
    }

    /// Checks that each path still leads to the file that was opened, unchanged: so all of them
    /// were there at one time, and files of two models are not mixed.
    fn check_paths(&self) -> Result<()> {
        let files = self.files.iter().map(|file| (&file.path, &file.stamp));
        let indexes = self.indexes.iter().map(|(path, stamp)| (path, stamp));
        for (path, stamp) in files.chain(indexes) {
            check_stamp(path, stamp, "stat", rustix::fs::stat(path))?;
        }
        Ok(())
    }

    /// Checks, once all files have been read, that no process wrote to one of them since it was
    /// opened.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        let mut files = self.files.iter();
        files.try_for_each(|SourceFile { path, fd, stamp }| {
            check_stamp(path, stamp, "fstat", rustix::fs::fstat(fd))
        })
    }

    /// Checks that no two files hold a tensor of the same name.
    fn check_names(&self) -> Result<()> {
        let mut files = HashMap::with_capacity(self.tensors.len());
        for SourceTensor { file, tensor } in &self.tensors {
            if let Some(other) = files.insert(tensor.name.as_str(), *file) {
                let other = self.files[other].path.display();
                let text = format!("tensor {:?} lies in {other} too", tensor.name);
                let fault = WeightsFileFault::new(text, "leave one of the two files out");
                return Err(of_file(&self.files[*file].path, fault));
            }
        }
        Ok(())
    }
}

/// Files for a message: the first ones.
fn listed(files: &[String]) -> String {
    const SHOWN: usize = 10;
    let shown: Vec<&str> = files.iter().take(SHOWN).map(String::as_str).collect();
    match files.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Checks that what `call` found is the file of this stamp, unchanged.
fn check_stamp(
    path: &Path,
    stamp: &FileStamp,
    call: &'static str,
    found: rustix::io::Result<Stat>,
) -> Result<()> {
    let found = found.map_err(|e| Error::os(call, path.display().to_string(), e))?;
    match FileStamp::of(&found) == *stamp {
        true => Ok(()),
        false => Err(of_file(path, WeightsFileFault::changed())),
    }
}

pub(super) fn of_file(path: &Path, fault: WeightsFileFault) -> Error {
    Error::Weights(WeightsFault::File {
        path: path.to_owned(),
        fault,
    })
}

/// The error of a read: the file has become shorter, or the system refuses.
pub(super) fn unreadable(path: &Path, error: std::io::Error) -> Error {
    if error.kind() == std::io::ErrorKind::UnexpectedEof {
        of_file(path, WeightsFileFault::changed())
    } else {
        Error::os("pread", path.display().to_string(), error)
    }
}

/// The indexes of a folder, and its safetensors files, each sorted by name.
fn models_of(folder: &Path) -> Result<(Vec<String>, Vec<String>)> {
    let failed = |e| Error::os("getdents", folder.display().to_string(), e);
    let (mut indexes, mut files) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let is_model = name.ends_with(EXTENSION);
        // macOS leaves files with a dot beside those that it copies.
        let is_hidden = name.starts_with('.');
        if is_hidden || !(is_model || Index::is_name(&name)) {
            continue;
        }
        // A link that leads nowhere is one of them, and an error when it is opened.
        if entry.file_type().map_err(failed)?.is_dir() {
            continue;
        }
        if is_model { &mut files } else { &mut indexes }.push(name);
    }
    indexes.sort_unstable();
    files.sort_unstable();
    Ok((indexes, files))
}

/// Whether a file's name says that it is one of several parts: `model-00001-of-00002.safetensors`.
fn is_part(file: &str) -> bool {
    let stem = file.strip_suffix(EXTENSION).unwrap_or(file);
    let Some((first, count)) = stem.rsplit_once("-of-") else {
        return false;
    };
    let number = first.rsplit_once('-').map(|(_, number)| number);
    let is_number = number.is_some_and(|number| number.parse::<u32>().is_ok());
    is_number && count.parse::<u32>().is_ok_and(|count| count > 1)
}

/// Opens a regular file, and returns it with its state from before the first byte is read. Does not
/// wait for the writer of a FIFO.
fn open_regular(path: &Path) -> Result<(CloseOnForkFd, FileStamp)> {
    let failed = |call| move |e| Error::os(call, path.display().to_string(), e);
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened: OwnedFd = rustix::fs::open(path, flags, Mode::empty())
        .and_then(above_standard)
        .map_err(failed("open"))?;
    let fd = CloseOnForkFd::new(opened).map_err(failed("open"))?;
    let stat = rustix::fs::fstat(&fd).map_err(failed("fstat"))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(of_file(
            path,
            WeightsFileFault::unnamed("it is neither a regular file nor a folder"),
        ));
    }
    let stamp = FileStamp::of(&stat);
    stamp.settle();
    Ok((fd, stamp))
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
        return Err(fault(safetensors::truncated(file_bytes, LENGTH_BYTES)));
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
