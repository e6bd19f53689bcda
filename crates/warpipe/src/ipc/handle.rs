//! The form of tickets, event handles and legacy handles, as bytes and as text: 3 bytes `WPH`; the
//! kind (`T` ticket, `E` event handle, `L` legacy handle); the version of the form and of all
//! payloads (16 bit, little-endian); the payload, by `postcard`; the CRC-32 (IEEE) of all of these
//! (32 bit, little-endian). The text is `warpipe-ticket:`, `warpipe-event:` or `warpipe-legacy:`,
//! and these bytes as lowercase hexadecimal digits.
//!
//! The bytes are untrusted. Their length is limited before anything is allocated. The checksum
//! shows that they were cut or changed on their way; it proves nothing about their author, so each
//! kind checks what its payload says.

use data_encoding::HEXLOWER;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::backend::IpcBytes;
use crate::error::{Error, HandleFault, Result};
use crate::ipc::domain::Domain;

/// Counts changes of the form and of any kind's payload.
pub(crate) const VERSION: u16 = 2;

const MAGIC: [u8; 3] = *b"WPH";

const HEAD_BYTES: usize = 6;
const CHECKSUM_BYTES: usize = 4;

/// The longest form: a domain's path may have 4096 bytes.
pub(crate) const BYTES_MAX: usize = 5 << 10;

/// The longest text, with room for white space around it.
pub(crate) const TEXT_BYTES_MAX: usize = 2 * BYTES_MAX + 64;

/// The domain's path as a handle names it: a text can hold UTF-8 alone.
pub(crate) fn path_of(domain: &Domain) -> Result<String> {
    let path = domain.path();
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| Error::argument("domain", path.display(), "a path in UTF-8"))
}

/// The kind of object that a handle names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandleKind {
    Ticket,
    Event,
    Legacy,
}

impl HandleKind {
    const ALL: [HandleKind; 3] = [HandleKind::Ticket, HandleKind::Event, HandleKind::Legacy];

    /// The code in the bytes, the prefix of the text, and the name in errors.
    fn form(self) -> (u8, &'static str, &'static str) {
        match self {
            HandleKind::Ticket => (b'T', "warpipe-ticket:", "a ticket"),
            HandleKind::Event => (b'E', "warpipe-event:", "an event handle"),
            HandleKind::Legacy => (b'L', "warpipe-legacy:", "a legacy handle"),
        }
    }

    fn code(self) -> u8 {
        self.form().0
    }

    fn prefix(self) -> &'static str {
        self.form().1
    }

    fn name(self) -> &'static str {
        self.form().2
    }

    /// The fault of a form that is not of this kind, but of the one with that property.
    fn other(self, is_found: impl Fn(HandleKind) -> bool) -> HandleFault {
        let wanted = self.name();
        match HandleKind::ALL.into_iter().find(|&kind| is_found(kind)) {
            Some(found) => HandleFault::OtherKind {
                wanted,
                found: found.name(),
            },
            None => HandleFault::NoHandle(wanted),
        }
    }
}

/// The bytes of a payload that can be serialized, as numbers, bytes and texts always can. Of
/// another they are bytes that [`from_bytes`] refuses.
pub(crate) fn to_bytes(kind: HandleKind, payload: &impl Serialize) -> Vec<u8> {
    seal(kind, &postcard::to_stdvec(payload).unwrap_or_default())
}

/// The bytes around a payload.
pub(crate) fn seal(kind: HandleKind, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD_BYTES + payload.len() + CHECKSUM_BYTES);
    bytes.extend(MAGIC);
    bytes.push(kind.code());
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(payload);
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    bytes
}

/// The payload of untrusted bytes.
pub(crate) fn from_bytes<T: DeserializeOwned>(
    kind: HandleKind,
    bytes: &[u8],
) -> Result<T, HandleFault> {
    if bytes.len() > BYTES_MAX {
        return Err(HandleFault::Oversized(BYTES_MAX));
    }
    let cut = HandleFault::Damaged("it was cut short");
    let (&[m0, m1, m2, code, v0, v1], _) = bytes.split_first_chunk().ok_or(cut.clone())?;
    if [m0, m1, m2] != MAGIC {
        return Err(HandleFault::NoHandle(kind.name()));
    }
    if code != kind.code() {
        return Err(kind.other(|found| code == found.code()));
    }
    let theirs = u16::from_le_bytes([v0, v1]);
    if theirs != VERSION {
        return Err(HandleFault::Version {
            theirs,
            ours: VERSION,
        });
    }
    let (checked, &sum) = bytes.split_last_chunk().ok_or(cut.clone())?;
    let payload = checked.get(HEAD_BYTES..).ok_or(cut)?;
    if crc32fast::hash(checked) != u32::from_le_bytes(sum) {
        return Err(HandleFault::Damaged("its checksum is wrong"));
    }
    match postcard::take_from_bytes(payload) {
        Ok((payload, [])) => Ok(payload),
        _ => Err(HandleFault::Damaged("its contents are not of its kind")),
    }
}

/// The text of bytes from [`to_bytes`].
pub(crate) fn to_text(kind: HandleKind, bytes: &[u8]) -> String {
    let mut text = kind.prefix().to_string();
    HEXLOWER.encode_append(bytes, &mut text);
    text
}

/// The payload of an untrusted text, which may have white space around it.
pub(crate) fn from_text<T: DeserializeOwned>(
    kind: HandleKind,
    text: &str,
) -> Result<T, HandleFault> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(HandleFault::Oversized(TEXT_BYTES_MAX));
    }
    let text = text.trim_ascii();
    let digits = text
        .strip_prefix(kind.prefix())
        .ok_or_else(|| kind.other(|found| text.starts_with(found.prefix())))?;
    let bytes = HEXLOWER
        .decode(digits.as_bytes())
        .map_err(|_| HandleFault::Damaged("its digits are not hexadecimal, or one is missing"))?;
    from_bytes(kind, &bytes)
}

/// The contents of a handle.
pub(crate) trait Payload: Serialize + DeserializeOwned {
    const KIND: HandleKind;

    /// The payload of a form that was read, once it is known to be sound.
    fn checked(payload: Result<Self, HandleFault>) -> Result<Self>;
}

/// How serde writes and reads a payload: as its text.
pub(crate) mod text {
    use serde::de::Error;

    use super::*;

    pub(crate) fn serialize<P, S>(payload: &P, serializer: S) -> Result<S::Ok, S::Error>
    where
        P: Payload,
        S: Serializer,
    {
        serializer.serialize_str(&to_text(P::KIND, &to_bytes(P::KIND, payload)))
    }

    pub(crate) fn deserialize<'de, P, D>(deserializer: D) -> Result<P, D::Error>
    where
        P: Payload,
        D: Deserializer<'de>,
    {
        let text = String::deserialize(deserializer)?;
        P::checked(from_text(P::KIND, &text)).map_err(D::Error::custom)
    }
}

/// The text form of a handle: `Display` and `FromStr` of its payload.
macro_rules! text_form {
    ($handle:ident, $payload:ident: $contents:ty) => {
        impl std::fmt::Display for $handle {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let kind = <$contents as $crate::ipc::handle::Payload>::KIND;
                let bytes = $crate::ipc::handle::to_bytes(kind, &self.$payload);
                f.write_str(&$crate::ipc::handle::to_text(kind, &bytes))
            }
        }

        impl std::str::FromStr for $handle {
            type Err = $crate::error::Error;

            fn from_str(text: &str) -> $crate::error::Result<$handle> {
                use $crate::ipc::handle::{Payload, from_text};
                let payload = <$contents>::checked(from_text(<$contents>::KIND, text));
                payload.map(|$payload| $handle { $payload })
            }
        }
    };
}
pub(crate) use text_form;

/// The 64 bytes of a `CUipcMemHandle` or a `CUipcEventHandle` in a payload: serde has arrays of up
/// to 32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DriverHandle(pub(crate) IpcBytes);

impl Serialize for DriverHandle {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (halves, _) = self.0.as_chunks::<32>();
        [halves[0], halves[1]].serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for DriverHandle {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<DriverHandle, D::Error> {
        let halves = <[[u8; 32]; 2]>::deserialize(deserializer)?;
        let mut bytes = [0; 64];
        bytes.copy_from_slice(halves.as_flattened());
        Ok(DriverHandle(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: HandleKind = HandleKind::Event;

    fn read(bytes: &[u8]) -> Result<(u32, String), HandleFault> {
        from_bytes(KIND, bytes)
    }

    #[test]
    fn a_payload_comes_back_from_bytes_and_text_and_white_space_around_it_is_no_part() {
        let payload = (7u32, "camera/front".to_string());
        let bytes = to_bytes(KIND, &payload);
        assert_eq!(read(&bytes), Ok(payload.clone()));
        let text = to_text(KIND, &bytes);
        assert_eq!(from_text(KIND, &format!(" {text}\n")), Ok(payload));
        let driver = DriverHandle(std::array::from_fn(|index| index as u8));
        let bytes = to_bytes(HandleKind::Legacy, &driver);
        assert_eq!(from_bytes(HandleKind::Legacy, &bytes), Ok(driver));
    }

    #[test]
    fn every_cut_and_every_flipped_bit_is_refused() {
        let bytes = to_bytes(KIND, &(7u32, "camera/front"));
        for length in 0..bytes.len() {
            let fault = read(&bytes[..length]).unwrap_err();
            assert!(
                matches!(fault, HandleFault::Damaged(_)),
                "{length}: {fault}"
            );
        }
        for bit in 0..8 * bytes.len() {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&changed).is_err(), "bit {bit}");
        }
        let text = to_text(KIND, &bytes);
        for end in 0..text.len() {
            assert!(from_text::<(u32, String)>(KIND, &text[..end]).is_err());
        }
        for garbage in [
            text.to_ascii_uppercase(),
            text.replace(':', ": "),
            format!("{text}0"),
            format!("{text}00"),
            format!("{}{}", KIND.prefix(), "ä".repeat(40)),
        ] {
            assert!(
                from_text::<(u32, String)>(KIND, &garbage).is_err(),
                "{garbage}"
            );
        }
    }

    #[test]
    fn another_kind_version_or_length_is_refused_by_name() {
        let (wanted, found) = ("an event handle", "a ticket");
        let other = to_bytes(HandleKind::Ticket, &(7u32, "x"));
        assert_eq!(read(&other), Err(HandleFault::OtherKind { wanted, found }));
        let text = to_text(HandleKind::Ticket, &other);
        let refused = from_text::<(u32, String)>(KIND, &text);
        assert_eq!(refused, Err(HandleFault::OtherKind { wanted, found }));
        let mut unknown = other.clone();
        unknown[3] = b'?';
        assert_eq!(read(&unknown), Err(HandleFault::NoHandle(wanted)));
        assert_eq!(read(b"a text of yours"), Err(HandleFault::NoHandle(wanted)));

        let mut newer = to_bytes(KIND, &(7u32, "x"));
        newer[4..6].copy_from_slice(&9u16.to_le_bytes());
        let (theirs, ours) = (9, VERSION);
        assert_eq!(read(&newer), Err(HandleFault::Version { theirs, ours }));

        let limit = BYTES_MAX;
        assert_eq!(
            read(&[0; BYTES_MAX + 1]),
            Err(HandleFault::Oversized(limit))
        );
        let long = "x".repeat(TEXT_BYTES_MAX + 1);
        let limit = TEXT_BYTES_MAX;
        let refused = from_text::<(u32, String)>(KIND, &long);
        assert_eq!(refused, Err(HandleFault::Oversized(limit)));
    }

    #[test]
    fn a_payload_with_bytes_behind_it_is_refused() {
        let mut payload = postcard::to_stdvec(&(7u32, "x")).unwrap();
        assert!(read(&seal(KIND, &payload)).is_ok());
        payload.push(0);
        assert!(matches!(
            read(&seal(KIND, &payload)),
            Err(HandleFault::Damaged(_))
        ));
    }
}
