//! Names of endpoints, and of their files.

use std::fmt;

use crate::error::{Error, Result};

/// The longest endpoint name: with the longest suffix and a path through `/proc/self/fd` it fills a
/// `sun_path`.
pub const NAME_BYTES_MAX: usize = 80;

/// A checked endpoint name.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointName(String);

impl EndpointName {
    /// Checks `name`: 1 to [`NAME_BYTES_MAX`] bytes of `a-z A-Z 0-9 _ - .` in parts joined by `/`;
    /// no part is empty or starts with a dot.
    ///
    /// # Errors
    /// [`Error::Name`], with the rule that it breaks.
    ///
    /// ```
    /// # use warpipe::EndpointName;
    /// assert!(EndpointName::new("camera/front").is_ok());
    /// assert!(EndpointName::new("../etc").is_err());
    /// ```
    pub fn new(name: &str) -> Result<EndpointName> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/');
        let reason = if name.is_empty() {
            "it is empty"
        } else if name.len() > NAME_BYTES_MAX {
            "it is longer than 80 bytes"
        } else if !name.chars().all(allowed) {
            "it has a character that is not allowed"
        } else if name.split('/').any(str::is_empty) {
            "it has an empty part"
        } else if name.split('/').any(|part| part.starts_with('.')) {
            "a part starts with a dot"
        } else {
            return Ok(EndpointName(name.to_owned()));
        };
        Err(Error::Name {
            name: name.chars().take(2 * NAME_BYTES_MAX).collect(),
            reason,
        })
    }

    /// [`new`](Self::new) for a name that others derive longer ones from: it is at most `limit`
    /// bytes long, or `too_long` is the rule that it breaks.
    pub(crate) fn of_at_most(
        limit: usize,
        name: &str,
        too_long: &'static str,
    ) -> Result<EndpointName> {
        let checked = EndpointName::new(name)?;
        if name.len() <= limit {
            return Ok(checked);
        }
        Err(Error::Name {
            name: name.to_owned(),
            reason: too_long,
        })
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of a file of this endpoint: `/` becomes `+`, which no name contains.
    pub(crate) fn file(&self, prefix: &str, suffix: &str) -> String {
        format!("{prefix}{}{suffix}", self.0.replace('/', "+"))
    }

    pub(crate) fn from_file(file: &str) -> Option<EndpointName> {
        let stem = file
            .strip_suffix(".lock")
            .or_else(|| file.strip_suffix(".sock"))?;
        EndpointName::new(&stem.replace('+', "/")).ok()
    }
}

impl fmt::Display for EndpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for EndpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}
