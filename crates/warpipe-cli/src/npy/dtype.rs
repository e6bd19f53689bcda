//! Element types as `.npy` files name them, there and back.

use warpipe::DType;

use super::Fault;

/// NumPy's names, without the byte order. `f1` is what `ml_dtypes` saves `float8_e5m2` as;
/// NumPy itself cannot load it, so it is read here and never written.
const NAMES: &[(&str, DType)] = &[
    ("b1", DType::BOOL),
    ("i1", DType::I8),
    ("i2", DType::I16),
    ("i4", DType::I32),
    ("i8", DType::I64),
    ("u1", DType::U8),
    ("u2", DType::U16),
    ("u4", DType::U32),
    ("u8", DType::U64),
    ("f1", DType::F8_E5M2),
    ("f2", DType::F16),
    ("f4", DType::F32),
    ("f8", DType::F64),
    ("c8", DType::C64),
    ("c16", DType::C128),
];

/// An element type, and the width in bytes of what a big-endian file makes us reverse (1: nothing).
#[derive(Debug, PartialEq, Eq)]
pub struct Element {
    pub dtype: DType,
    pub swap: usize,
}

/// The type that `descr` names.
pub fn parse(descr: &str, void_as: Option<DType>) -> Result<Element, Fault> {
    let (order, name) = match descr.as_bytes().first() {
        Some(b'<' | b'>' | b'=' | b'|') => descr.split_at(1),
        _ => ("", descr),
    };
    if name.starts_with('O') {
        return Err(Fault::Object);
    }
    if let Some(width) = name.strip_prefix('V') {
        let dtype = void(descr, width, void_as)?;
        return Ok(Element { dtype, swap: 1 });
    }
    let known = NAMES.iter().find(|(known, _)| *known == name);
    let &(_, dtype) = known.ok_or_else(|| Fault::Dtype(descr.to_owned()))?;
    let swap = if order == ">" {
        component_bytes(dtype)
    } else {
        1
    };
    Ok(Element { dtype, swap })
}

fn void(descr: &str, width: &str, void_as: Option<DType>) -> Result<DType, Fault> {
    let found: u64 = width.parse().map_err(|_| Fault::Dtype(descr.to_owned()))?;
    match void_as {
        None => Err(Fault::Void(descr.to_owned())),
        Some(wanted) if wanted.bytes() != found => Err(Fault::VoidWidth { found, wanted }),
        Some(wanted) => Ok(wanted),
    }
}

/// A complex number is two numbers, each with its own byte order.
fn component_bytes(dtype: DType) -> usize {
    let parts = if matches!(dtype, DType::C32 | DType::C64 | DType::C128) {
        2
    } else {
        1
    };
    usize::from(dtype.bits() / 8) / parts
}

/// The name of `dtype` in a file: NumPy's name, or for the types it lacks the void of that width,
/// as `ml_dtypes` does.
pub fn descr(dtype: DType) -> String {
    let name = NAMES
        .iter()
        .find(|(_, known)| *known == dtype)
        .map(|(name, _)| *name);
    match name.filter(|name| *name != "f1") {
        Some(name) if dtype.bytes() == 1 => format!("|{name}"),
        Some(name) => format!("<{name}"),
        None => format!("<V{}", dtype.bytes()),
    }
}
