//! A handle on its way: as text for people, pipes and command lines, and by serde.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::LegacyHandle;
use crate::error::{Error, LegacyFault};

/// The prefix of a handle's text; the rest is its bytes in hexadecimal.
const PREFIX: &str = "warpipe-legacy:";

impl fmt::Display for LegacyHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        self.to_bytes()
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for LegacyHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, offset, pid) = (self.bytes(), self.offset(), self.pid());
        write!(
            f,
            "LegacyHandle({bytes} bytes from {offset} on, of process {pid} on {})",
            self.device()
        )
    }
}

impl FromStr for LegacyHandle {
    type Err = Error;

    fn from_str(text: &str) -> Result<LegacyHandle, Error> {
        let garbled = |reason| Error::legacy(LegacyFault::Garbled(reason));
        let digits = text.trim_ascii().strip_prefix(PREFIX);
        let digits = digits
            .ok_or_else(|| garbled("its text does not begin with warpipe-legacy:"))?
            .as_bytes();
        if digits.len() != 2 * LegacyHandle::BYTES {
            return Err(Error::legacy(LegacyFault::Length {
                found: digits.len() / 2,
                wanted: LegacyHandle::BYTES,
            }));
        }
        let mut bytes = [0; LegacyHandle::BYTES];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let value = digit(pair[0])
                .zip(digit(pair[1]))
                .map(|(high, low)| high << 4 | low);
            *byte = value
                .ok_or_else(|| garbled("its text has something else than hexadecimal digits"))?;
        }
        LegacyHandle::from_bytes(&bytes)
    }
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).map(|digit| digit as u8)
}

impl Serialize for LegacyHandle {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            return serializer.collect_str(self);
        }
        serializer.serialize_bytes(&self.to_bytes())
    }
}

impl<'de> Deserialize<'de> for LegacyHandle {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<LegacyHandle, D::Error> {
        if deserializer.is_human_readable() {
            return deserializer.deserialize_str(Either);
        }
        deserializer.deserialize_bytes(Either)
    }
}

/// Text or bytes.
struct Either;

impl Visitor<'_> for Either {
    type Value = LegacyHandle;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a legacy handle")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<LegacyHandle, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<LegacyHandle, E> {
        LegacyHandle::from_bytes(bytes).map_err(E::custom)
    }
}
