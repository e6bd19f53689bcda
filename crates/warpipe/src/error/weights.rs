//! The faults of model weights.

use std::path::PathBuf;

/// The fault of model weights.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsFault {
    /// A file, or a folder, that cannot be loaded.
    #[error("{} cannot be loaded: {fault}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The fault.
        fault: WeightsFileFault,
    },
    /// Published weights are not proven to be what their publisher wrote.
    #[error("version {version} of the weights {name:?} {}", unverified(tensors))]
    Unverified {
        /// The weights' name.
        name: String,
        /// The version.
        version: u64,
        /// The tensors with another content hash, in the order of their offsets: they are damaged.
        /// None of a version without hashes to compare.
        tensors: Vec<String>,
    },
    /// A version that cannot take the place of the one that is followed: its tensors lie at other
    /// places. Nothing was changed.
    #[error(
        "version {version} of the weights {name:?} does not fit the version that is followed: \
         {}",
        difference.text()
    )]
    Mismatch {
        /// The weights' name.
        name: String,
        /// The version that does not fit.
        version: u64,
        /// The tensors in which it differs.
        difference: Box<WeightsDifference>,
    },
}

/// The fault of a file, or of a folder, that is to hold model weights.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
#[non_exhaustive]
pub struct WeightsFileFault {
    /// What is wrong.
    pub text: String,
    /// The next step; [`hint`](crate::Error::hint) says it.
    pub next: &'static str,
}

impl WeightsFileFault {
    pub(crate) fn new(text: impl Into<String>, next: &'static str) -> Self {
        WeightsFileFault {
            text: text.into(),
            next,
        }
    }

    /// Another path is to be named.
    pub(crate) fn unnamed(text: &str) -> Self {
        let next = "name safetensors files, an index of them, or a folder with one model";
        WeightsFileFault::new(text, next)
    }

    /// The file is cut short, or is none.
    pub(crate) fn damaged(text: impl Into<String>) -> Self {
        let next = "take a whole safetensors file: copy or download it again";
        WeightsFileFault::new(text, next)
    }

    /// A process wrote to the file, or put another one in its place.
    pub(crate) fn changed() -> Self {
        let next = "load it again when no process writes to it";
        WeightsFileFault::new("it was changed while it was loaded", next)
    }

    /// There is more of something than this library loads under one name.
    pub(crate) fn limit(what: &str, limit: u64) -> Self {
        let text = format!("{what}: more than {limit}");
        WeightsFileFault::new(text, "split the weights over several names")
    }
}

/// What is wrong with weights of which these tensors have another content hash.
fn unverified(tensors: &[String]) -> String {
    match tensors {
        [] => "has no content hashes to compare".into(),
        _ => format!("is damaged: the content hash of {} differs", names(tensors)),
    }
}

/// The tensors of an error, for people: the first ones by name.
fn names(tensors: &[String]) -> String {
    const SHOWN: usize = 3;
    let shown = tensors.iter().take(SHOWN).map(|t| format!("{t:?}"));
    let shown = shown.collect::<Vec<_>>().join(", ");
    match tensors.len() {
        1 => format!("tensor {shown}"),
        ..=SHOWN => format!("tensors {shown}"),
        all => format!("tensors {shown} and {} more", all - SHOWN),
    }
}

/// The tensors in which a version of weights differs from the one that is followed. If there are
/// none, its memory is divided in another way.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WeightsDifference {
    /// The names that it lacks.
    pub missing: Vec<String>,
    /// The names that it alone has.
    pub unexpected: Vec<String>,
    /// The names of tensors of another shape, another element type or at another place.
    pub different: Vec<String>,
}

impl WeightsDifference {
    fn text(&self) -> String {
        let of = |what: &str, tensors: &[String]| {
            (!tensors.is_empty()).then(|| format!("{what} {}", names(tensors)))
        };
        let parts = [
            of("it lacks", &self.missing),
            of("it alone has", &self.unexpected),
            of(
                "it has another shape, element type or place for",
                &self.different,
            ),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        match &parts[..] {
            [] => "its memory is divided in another way".into(),
            parts => parts.join("; "),
        }
    }
}
