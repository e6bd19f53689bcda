//! The header of a `.npy` file: a length, and a Python literal of three keys.

use std::io::Read;

use super::Fault;

/// The longest header that is read. NumPy's own limit for untrusted files is 10,000 bytes.
pub const LENGTH_MAX: u64 = 65_535;

/// More dimensions than any tensor has are not even counted.
const DIMENSIONS_MAX: usize = 64;

/// The header's three keys.
#[derive(Debug, PartialEq, Eq)]
pub struct Fields {
    pub descr: String,
    pub fortran_order: bool,
    pub shape: Vec<u64>,
}

/// The header's text, and where the data begins.
pub fn read(reader: &mut impl Read, length: u64) -> Result<(Vec<u8>, u64), Fault> {
    let mut head = [0u8; 8];
    read_part(reader, &mut head, length)?;
    if &head[..6] != b"\x93NUMPY" {
        return Err(Fault::Magic);
    }
    let (size, width) = match (head[6], head[7]) {
        (1, 0) => {
            let mut size = [0u8; 2];
            read_part(reader, &mut size, length)?;
            (u64::from(u16::from_le_bytes(size)), 2)
        }
        (2 | 3, 0) => {
            let mut size = [0u8; 4];
            read_part(reader, &mut size, length)?;
            (u64::from(u32::from_le_bytes(size)), 4)
        }
        (major, minor) => return Err(Fault::Version(major, minor)),
    };
    if size > LENGTH_MAX {
        return Err(Fault::HeaderLength(size));
    }
    let start = 8 + width + size;
    if start > length {
        return Err(Fault::Short {
            needed: start,
            found: length,
        });
    }
    let mut text = vec![0u8; size as usize];
    read_part(reader, &mut text, length)?;
    Ok((text, start))
}

fn read_part(reader: &mut impl Read, part: &mut [u8], length: u64) -> Result<(), Fault> {
    reader.read_exact(part).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof if length < 8 => Fault::Magic,
        std::io::ErrorKind::UnexpectedEof => Fault::Short {
            needed: length + 1,
            found: length,
        },
        _ => Fault::Io(error),
    })
}

/// Parses `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`, keys in any order.
pub fn parse(text: &[u8]) -> Result<Fields, Fault> {
    let mut parser = Parser { text, at: 0 };
    let (mut descr, mut fortran_order, mut shape) = (None, None, None);
    parser.expect(b'{')?;
    while !parser.accept(b'}') {
        let key = parser.string()?;
        parser.expect(b':')?;
        let again = match key.as_str() {
            "descr" => descr.replace(parser.descr()?).is_some(),
            "fortran_order" => fortran_order.replace(parser.boolean()?).is_some(),
            "shape" => shape.replace(parser.shape()?).is_some(),
            _ => return Err(parser.fault(format!("the key {key:?} has no meaning"))),
        };
        if again {
            return Err(parser.fault(format!("the key {key:?} comes twice")));
        }
        if !parser.accept(b',') {
            parser.expect(b'}')?;
            break;
        }
    }
    parser.end()?;
    Ok(Fields {
        descr: descr.ok_or(Fault::Missing("descr"))?,
        fortran_order: fortran_order.ok_or(Fault::Missing("fortran_order"))?,
        shape: shape.ok_or(Fault::Missing("shape"))?,
    })
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn fault(&self, reason: impl Into<String>) -> Fault {
        Fault::Header {
            at: self.at,
            reason: reason.into(),
        }
    }

    fn peek(&mut self) -> Option<u8> {
        while matches!(self.text.get(self.at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn accept(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8) -> Result<(), Fault> {
        if self.accept(byte) {
            Ok(())
        } else {
            Err(self.fault(format!("{:?} is due", char::from(byte))))
        }
    }

    fn end(&mut self) -> Result<(), Fault> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.fault("something follows the closing brace")),
        }
    }

    /// A quoted string without escapes: no key and no dtype needs one.
    fn string(&mut self) -> Result<String, Fault> {
        let Some(quote @ (b'\'' | b'"')) = self.peek() else {
            return Err(self.fault("a quoted string is due"));
        };
        let from = self.at + 1;
        let Some(length) = self.text[from..].iter().position(|&byte| byte == quote) else {
            return Err(self.fault("a string has no end"));
        };
        let inside = &self.text[from..from + length];
        if !inside
            .iter()
            .all(|&byte| byte.is_ascii_graphic() && byte != b'\\')
        {
            return Err(self.fault("a string holds more than plain letters"));
        }
        self.at = from + length + 1;
        Ok(inside.iter().map(|&byte| char::from(byte)).collect())
    }

    fn descr(&mut self) -> Result<String, Fault> {
        match self.peek() {
            Some(b'[' | b'(') => Err(Fault::Structured),
            _ => self.string(),
        }
    }

    fn boolean(&mut self) -> Result<bool, Fault> {
        self.peek();
        for (word, value) in [(&b"True"[..], true), (b"False", false)] {
            if self.text[self.at..].starts_with(word) {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err(self.fault("True or False is due"))
    }

    /// A tuple of integers: `()`, `(3,)`, `(3, 4)`. As in Python, `(3)` is no tuple.
    fn shape(&mut self) -> Result<Vec<u64>, Fault> {
        self.expect(b'(')?;
        let mut shape = Vec::new();
        let mut comma = true;
        while !self.accept(b')') {
            if !comma {
                return Err(self.fault("',' or ')' is due"));
            }
            if shape.len() == DIMENSIONS_MAX {
                return Err(Fault::Shape(format!(
                    "more than {DIMENSIONS_MAX} dimensions"
                )));
            }
            shape.push(self.dimension()?);
            comma = self.accept(b',');
        }
        if shape.len() == 1 && !comma {
            return Err(self.fault("a shape of one dimension ends in ',)'"));
        }
        Ok(shape)
    }

    fn dimension(&mut self) -> Result<u64, Fault> {
        let negative = self.accept(b'-');
        self.peek();
        let rest = &self.text[self.at..];
        let digits = &rest[..rest
            .iter()
            .position(|byte| !byte.is_ascii_digit())
            .unwrap_or(rest.len())];
        if digits.is_empty() {
            return Err(self.fault("a whole number is due"));
        }
        let number: String = digits.iter().map(|&digit| char::from(digit)).collect();
        if negative {
            return Err(Fault::Negative(format!("-{number}")));
        }
        self.at += digits.len();
        // Python 2 wrote its long integers as `3L`.
        self.at += usize::from(self.text.get(self.at) == Some(&b'L'));
        number
            .parse()
            .map_err(|_| Fault::Shape(format!("the dimension {number} is past 64 bits")))
    }
}
