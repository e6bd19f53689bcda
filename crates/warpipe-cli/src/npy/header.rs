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
    let width = match (head[6], head[7]) {
        (1, 0) => 2,
        (2 | 3, 0) => 4,
        (major, minor) => return Err(Fault::Version(major, minor)),
    };
    let mut size = [0u8; 4];
    read_part(reader, &mut size[..width], length)?;
    let size = u64::from(u32::from_le_bytes(size));
    if size > LENGTH_MAX {
        return Err(Fault::HeaderLength(size));
    }
    let needed = 8 + width as u64 + size;
    if needed > length {
        let found = length;
        return Err(Fault::Short { needed, found });
    }
    let mut text = vec![0u8; size as usize];
    read_part(reader, &mut text, length)?;
    Ok((text, needed))
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
    parser.expect("{")?;
    while !parser.accept("}") {
        let key = parser.string()?;
        parser.expect(":")?;
        let again = match key.as_str() {
            "descr" => descr.replace(parser.descr()?).is_some(),
            "fortran_order" => fortran_order.replace(parser.boolean()?).is_some(),
            "shape" => shape.replace(parser.shape()?).is_some(),
            _ => return parser.fault(format!("the key {key:?} has no meaning")),
        };
        if again {
            return parser.fault(format!("the key {key:?} comes twice"));
        }
        if !parser.accept(",") {
            parser.expect("}")?;
            break;
        }
    }
    if parser.next().is_some() {
        return parser.fault("something follows the closing brace");
    }
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

impl<'a> Parser<'a> {
    fn fault<T>(&self, reason: impl Into<String>) -> Result<T, Fault> {
        Err(Fault::Header {
            at: self.at,
            reason: reason.into(),
        })
    }

    /// The next byte that is no blank.
    fn next(&mut self) -> Option<u8> {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_ascii_start().len();
        self.text.get(self.at).copied()
    }

    fn accept(&mut self, token: &str) -> bool {
        self.next();
        let found = self.text[self.at..].starts_with(token.as_bytes());
        self.at += if found { token.len() } else { 0 };
        found
    }

    fn expect(&mut self, token: &str) -> Result<(), Fault> {
        match self.accept(token) {
            true => Ok(()),
            false => self.fault(format!("{token:?} is due")),
        }
    }

    /// The bytes from here on for which `is_part` holds.
    fn take_while(&mut self, is_part: impl Fn(&u8) -> bool) -> &'a str {
        let rest = &self.text[self.at..];
        let end = rest.iter().position(|byte| !is_part(byte));
        let taken = &rest[..end.unwrap_or(rest.len())];
        self.at += taken.len();
        str::from_utf8(taken).unwrap_or_default()
    }

    /// A quoted string without escapes: no key and no dtype needs one.
    fn string(&mut self) -> Result<String, Fault> {
        let Some(quote @ (b'\'' | b'"')) = self.next() else {
            return self.fault("a quoted string is due");
        };
        self.at += 1;
        let is_plain = |byte: &u8| byte.is_ascii_graphic() && *byte != b'\\' && *byte != quote;
        let inside = self.take_while(is_plain);
        match self.text.get(self.at) {
            Some(&end) if end == quote => self.at += 1,
            Some(_) => return self.fault("a string holds more than plain letters"),
            None => return self.fault("a string has no end"),
        }
        Ok(inside.to_owned())
    }

    fn descr(&mut self) -> Result<String, Fault> {
        match self.next() {
            Some(b'[' | b'(') => Err(Fault::Structured),
            _ => self.string(),
        }
    }

    fn boolean(&mut self) -> Result<bool, Fault> {
        match self.accept("True") {
            true => Ok(true),
            false if self.accept("False") => Ok(false),
            false => self.fault("True or False is due"),
        }
    }

    /// A tuple of integers: `()`, `(3,)`, `(3, 4)`. As in Python, `(3)` is no tuple.
    fn shape(&mut self) -> Result<Vec<u64>, Fault> {
        self.expect("(")?;
        let mut shape = Vec::new();
        let mut comma = true;
        while !self.accept(")") {
            if !comma {
                return self.fault("',' or ')' is due");
            }
            if shape.len() == DIMENSIONS_MAX {
                let reason = format!("more than {DIMENSIONS_MAX} dimensions");
                return Err(Fault::Shape(reason));
            }
            shape.push(self.dimension()?);
            comma = self.accept(",");
        }
        if shape.len() == 1 && !comma {
            return self.fault("a shape of one dimension ends in ',)'");
        }
        Ok(shape)
    }

    fn dimension(&mut self) -> Result<u64, Fault> {
        let is_negative = self.accept("-");
        self.next();
        let digits = self.take_while(u8::is_ascii_digit);
        if digits.is_empty() {
            return self.fault("a whole number is due");
        }
        if is_negative {
            return Err(Fault::Negative(format!("-{digits}")));
        }
        // Python 2 wrote its long integers as `3L`.
        if self.text.get(self.at) == Some(&b'L') {
            self.at += 1;
        }
        let past = |_| Fault::Shape(format!("the dimension {digits} is past 64 bits"));
        digits.parse().map_err(past)
    }
}
