//! The index of a folder: which of its files holds which tensor.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::AsFd;
use std::path::{Component, Path, PathBuf};

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::stamp::FileStamp;
use super::{of_file, open_regular, unreadable};
use crate::backend::zeroed;
use crate::error::{Error, Result, WeightsFileFault};
use crate::weights::manifest::read_exact;
use crate::weights::safetensors::TENSORS_MAX;
use crate::weights::safetensors::shortened;

/// The longest index.
pub(super) const INDEX_BYTES_MAX: u64 = 256 << 20;

/// An index that was read and checked. None of its files has been opened.
#[derive(Debug)]
pub(super) struct Index {
    pub(super) path: PathBuf,
    pub(super) stamp: FileStamp,
    /// The files, below the index's folder.
    files: Vec<PathBuf>,
    /// Each tensor with the number of its file, sorted by name.
    tensors: Vec<(String, usize)>,
}

impl Index {
    /// Whether a file has the name of one, as Hugging Face's libraries write it: also of a variant
    /// (`model.safetensors.index.fp16.json`).
    pub(super) fn is_name(file: &str) -> bool {
        file.ends_with(".json") && file.contains(".safetensors.index.")
    }

    pub(super) fn read(path: &Path) -> Result<Index> {
        let fault = |text: String| of_file(path, of_index(&text));
        let limit = |what, limit| of_file(path, WeightsFileFault::limit(what, limit));
        let (fd, stamp) = open_regular(path)?;
        if stamp.bytes > INDEX_BYTES_MAX {
            return Err(limit("bytes of the index", INDEX_BYTES_MAX));
        }
        let mut text = zeroed(stamp.bytes)?;
        read_exact(fd.as_fd(), &mut text, 0).map_err(|error| unreadable(path, error))?;
        let read: IndexText = serde_json::from_slice(&text).map_err(|error| {
            let error = shortened(&error.to_string());
            fault(format!("is garbled: {error}"))
        })?;
        let WeightMap {
            files,
            mut tensors,
            is_over,
        } = read.weight_map;
        if is_over {
            return Err(limit("tensors", TENSORS_MAX as u64));
        }
        if tensors.is_empty() {
            return Err(fault("names no tensor".into()));
        }
        tensors.sort_unstable();
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let name = shortened(&pair[0].0);
            return Err(fault(format!("is garbled: tensor {name:?} is named twice")));
        }
        let below = |file: &String| {
            inside(file).ok_or_else(|| {
                let file = shortened(file);
                fault(format!("names {file:?}, which is not in its folder"))
            })
        };
        let files = files.iter().map(below).collect::<Result<_>>()?;
        Ok(Index {
            path: path.to_owned(),
            stamp,
            files,
            tensors,
        })
    }

    /// Whether it names this file.
    pub(super) fn names(&self, file: &str) -> bool {
        self.files.iter().any(|named| named == Path::new(file))
    }

    /// The files, sorted and each once, with its numbers: an index may write one file in two ways.
    pub(super) fn files(&self) -> Vec<(&Path, Vec<usize>)> {
        let mut numbered: Vec<(&Path, usize)> = Vec::new();
        numbered.extend(self.files.iter().enumerate().map(|(n, f)| (f.as_path(), n)));
        numbered.sort_unstable();
        let of_one = numbered.chunk_by(|a, b| a.0 == b.0);
        of_one
            .map(|same| (same[0].0, same.iter().map(|it| it.1).collect()))
            .collect()
    }

    /// The position of a tensor in the index, if it assigns the tensor to one of these files.
    pub(super) fn position(&self, tensor: &str, files: &[usize]) -> Option<usize> {
        let found = self
            .tensors
            .binary_search_by(|it| it.0.as_str().cmp(tensor));
        found.ok().filter(|&at| files.contains(&self.tensors[at].1))
    }

    /// The number of tensors.
    pub(super) fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// The tensor at a position is not in the file that it is assigned to.
    pub(super) fn lacks(&self, position: usize) -> Error {
        let (name, file) = &self.tensors[position];
        let (name, file) = (shortened(name), self.files[*file].to_string_lossy());
        let file = shortened(&file);
        let text = format!("has tensor {name:?} in {file:?}, which lacks it");
        of_file(&self.path, of_index(&text))
    }
}

fn of_index(text: &str) -> WeightsFileFault {
    let next = "download the folder again, or name its safetensors files one by one";
    WeightsFileFault::new(format!("the index {text}"), next)
}

/// The path of a file in the index's folder or below it. An index may come from anywhere: it must
/// not name files elsewhere.
fn inside(file: &str) -> Option<PathBuf> {
    let mut path = PathBuf::new();
    for part in Path::new(file).components() {
        match part {
            Component::Normal(part) => path.push(part),
            Component::CurDir => {}
            _ => return None,
        }
    }
    (!path.as_os_str().is_empty()).then_some(path)
}

#[derive(serde::Deserialize)]
struct IndexText {
    weight_map: WeightMap,
}

/// The tensors of an index with the numbers of their files.
#[derive(Default)]
struct WeightMap {
    files: Vec<String>,
    tensors: Vec<(String, usize)>,
    /// Whether there are more than are loaded under one name; those are not kept.
    is_over: bool,
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<WeightMap, D::Error> {
        from.deserialize_map(WeightMap::default())
    }
}

impl<'de> Visitor<'de> for WeightMap {
    type Value = WeightMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensors to files")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut from: A) -> Result<WeightMap, A::Error> {
        let mut numbers = HashMap::<String, usize>::new();
        while self.tensors.len() < TENSORS_MAX {
            let Some((tensor, file)) = from.next_entry::<String, String>()? else {
                return Ok(self);
            };
            let number = match numbers.get(&file) {
                Some(&number) => number,
                None => {
                    self.files.push(file.clone());
                    numbers.insert(file, self.files.len() - 1);
                    self.files.len() - 1
                }
            };
            self.tensors.push((tensor, number));
        }
        while from.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            self.is_over = true;
        }
        Ok(self)
    }
}
