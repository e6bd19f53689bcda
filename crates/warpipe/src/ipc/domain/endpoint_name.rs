//! Names of endpoints, and of their files.

use std::fmt;

use crate::error::{Error, NameFault, Result};

/// The longest name that an endpoint is given, but for weights: with the longest suffix and a path
/// through `/proc/self/fd` it fills a `sun_path`.
pub const NAME_BYTES_MAX: usize = 80;

/// The longest name of any endpoint, also of one that is derived from the name of weights: with the
/// longest suffix it is the name of a file.
pub(crate) const DERIVED_NAME_BYTES_MAX: usize = 240;

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
        EndpointName::of_at_most(NAME_BYTES_MAX, name, "it is longer than 80 bytes")
    }

    /// [`new`](Self::new) for a name that an endpoint of this library has: those that it derives
    /// are longer.
    pub(crate) fn of_endpoint(name: &str) -> Result<EndpointName> {
        EndpointName::of_at_most(DERIVED_NAME_BYTES_MAX, name, "it is longer than 240 bytes")
    }

    /// [`new`](Self::new) with another limit; `too_long` is the rule that a longer name breaks.
    pub(crate) fn of_at_most(
        limit: usize,
        name: &str,
        too_long: &'static str,
    ) -> Result<EndpointName> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/');
        let reason = if name.is_empty() {
            "it is empty"
        } else if name.len() > limit {
            too_long
        } else if !name.chars().all(allowed) {
            "it has a character that is not allowed"
        } else if name.split('/').any(str::is_empty) {
            "it has an empty part"
        } else if name.split('/').any(|part| part.starts_with('.')) {
            "a part starts with a dot"
        } else {
            return Ok(EndpointName(name.to_owned()));
        };
        Err(Error::Name(NameFault::Invalid {
            name: name.chars().take(2 * limit).collect(),
            reason,
        }))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of a file of this endpoint: `/` becomes `+`, which no name contains.
    pub(crate) fn file(&self, prefix: &str, suffix: &str) -> String {
        format!("{prefix}{}{suffix}", self.0.replace('/', "+"))
    }

    /// The names of this endpoint's files in the directory of its domain: the lock, the socket, and
    /// the socket before it can be connected to.
    #[doc(hidden)] // For the command line.
    pub fn files(&self) -> [String; 3] {
        [
            self.file("", ".lock"),
            self.file("", ".sock"),
            self.new_file(),
        ]
    }

    /// The file of the socket before it can be connected to. `bind` takes a path of 108 bytes, so a
    /// long name stands there by its hash.
    pub(crate) fn new_file(&self) -> String {
        match self.is_long() {
            false => self.file(".", ".new"),
            true => format!(".{:016x}.new", crate::origin::hash(self.0.as_bytes())),
        }
    }

    /// Whether a path to its socket may be too long for a socket's address.
    pub(crate) fn is_long(&self) -> bool {
        self.0.len() > NAME_BYTES_MAX
    }

    pub(crate) fn from_file(file: &str) -> Option<EndpointName> {
        let stem = file
            .strip_suffix(".lock")
            .or_else(|| file.strip_suffix(".sock"))?;
        EndpointName::of_endpoint(&stem.replace('+', "/")).ok()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ipc::domain::Domain;

    #[test]
    fn the_longest_names_are_claimed_connected_to_and_removed_when_their_owner_has_died() {
        let folder = std::env::temp_dir().join(format!("warpipe-long-{}", std::process::id()));
        let domain = Domain::at(&folder).unwrap();
        let name = EndpointName::of_endpoint(&"n".repeat(DERIVED_NAME_BYTES_MAX)).unwrap();
        assert!(name.files().iter().all(|file| file.len() <= 255));
        let claim = domain.claim(&name, false).unwrap();
        let limit = crate::ipc::client_handshake::HandshakeLimit::of(std::time::Duration::ZERO);
        domain
            .connect(&name, crate::Kind::Publisher, Some(&limit))
            .unwrap();
        drop(claim);
        assert!(
            domain
                .connect(&name, crate::Kind::Publisher, Some(&limit))
                .is_err()
        );
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        // Killed before its socket had its name, and afterwards.
        let [lock, socket, new] = name.files();
        for left in [new, socket] {
            std::fs::write(folder.join(&lock), "warpipe 999999999 \n").unwrap();
            let short = folder.join("s");
            drop(std::os::unix::net::UnixListener::bind(&short).unwrap());
            std::fs::rename(&short, folder.join(left)).unwrap();
            assert_eq!(domain.clean().unwrap(), std::slice::from_ref(&name));
            assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        }
        assert!(EndpointName::of_endpoint(&"n".repeat(DERIVED_NAME_BYTES_MAX + 1)).is_err());
        std::fs::remove_dir(folder).unwrap();
    }
}
