//! Keys, from the bytes that a terminal sends (ECMA-48, as xterm sends them).

/// A key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    Char(char),
    Tab,
    Enter,
    Escape,
    Backspace,
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    /// Ctrl-C or Ctrl-D, which a terminal in raw mode sends as bytes.
    Interrupt,
    /// Ctrl-Z.
    Suspend,
    /// Any other key.
    Other,
}

/// Takes the keys out of what a terminal has sent. A sequence that is not complete stays in
/// `bytes`, unless `is_all` says that nothing more belongs to it: then it was the key Escape.
pub fn take(bytes: &mut Vec<u8>, is_all: bool) -> Vec<Key> {
    let mut keys = Vec::new();
    let mut rest = &bytes[..];
    while let Some((key, length)) = next(rest, is_all) {
        keys.push(key);
        rest = &rest[length..];
    }
    *bytes = rest.to_vec();
    keys
}

/// The first key and its length. `None` for no key, or for half of one.
fn next(bytes: &[u8], is_all: bool) -> Option<(Key, usize)> {
    match *bytes.first()? {
        0x1b => escape(bytes, is_all),
        b'\t' => Some((Key::Tab, 1)),
        b'\r' | b'\n' => Some((Key::Enter, 1)),
        0x7f | 0x08 => Some((Key::Backspace, 1)),
        3 | 4 => Some((Key::Interrupt, 1)),
        0x1a => Some((Key::Suspend, 1)),
        0..0x20 => Some((Key::Other, 1)),
        byte @ 0x20..0x7f => Some((Key::Char(byte.into()), 1)),
        // A letter of several bytes. No command is one, and names have none.
        byte => {
            let length = match byte {
                0xc2..=0xdf => 2,
                0xe0..=0xef => 3,
                0xf0..=0xf4 => 4,
                _ => 1,
            };
            (bytes.len() >= length || is_all).then_some((Key::Other, length.min(bytes.len())))
        }
    }
}

fn escape(bytes: &[u8], is_all: bool) -> Option<(Key, usize)> {
    match bytes.get(1) {
        None => is_all.then_some((Key::Escape, 1)),
        Some(b'[' | b'O') => {
            let is_final = |byte: &u8| (0x40..0x7f).contains(byte);
            let Some(end) = bytes[2..].iter().position(is_final) else {
                return is_all.then_some((Key::Other, bytes.len()));
            };
            let key = match &bytes[2..=2 + end] {
                b"A" => Key::Up,
                b"B" => Key::Down,
                b"H" | b"1~" | b"7~" => Key::Home,
                b"F" | b"4~" | b"8~" => Key::End,
                b"5~" => Key::PageUp,
                b"6~" => Key::PageDown,
                _ => Key::Other,
            };
            Some((key, end + 3))
        }
        Some(_) => Some((Key::Escape, 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_told_apart_also_when_they_come_in_pieces() {
        let mut bytes = b"q\x1b[A\x1b[6~\t\x1b".to_vec();
        assert_eq!(
            take(&mut bytes, false),
            [Key::Char('q'), Key::Up, Key::PageDown, Key::Tab]
        );
        bytes.extend(b"[B");
        assert_eq!(take(&mut bytes, false), [Key::Down]);
        bytes.push(0x1b);
        assert_eq!(take(&mut bytes, false), []);
        assert_eq!(take(&mut bytes, true), [Key::Escape]);
        assert!(bytes.is_empty());
    }

    #[test]
    fn any_bytes_are_keys_and_none_are_left_in_the_end() {
        for seed in 0..2000u32 {
            let noise = (0..40u32).map(|at| (seed.wrapping_mul(2_654_435_761) >> (at % 25)) as u8);
            let mut bytes: Vec<u8> = noise.collect();
            take(&mut bytes, false);
            take(&mut bytes, true);
            assert!(bytes.is_empty(), "seed {seed}");
        }
    }
}
