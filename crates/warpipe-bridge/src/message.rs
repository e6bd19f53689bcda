//! The messages between bridges. Each is the attachment of one Zenoh sample: the version, the
//! sender, and the message in postcard; the bytes of a tensor's part are the sample's payload. A
//! received message is copied once into these types and checked, and only the copy is used.

use serde::{Deserialize, Serialize};
use warpipe::{DType, Layout, NAME_BYTES_MAX, PART_NAME_BYTES_MAX, PARTS_MAX, RANK_MAX};

use crate::status::STATUS_PREFIX;

/// The version of keys and messages. Bridges of different versions do not see each other.
pub(crate) const VERSION: u8 = 2;
/// The most bytes of an attachment: more than a part with the most samples, or with a sample of
/// several tensors, the longest messages.
pub(crate) const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// The most bytes of a tensor in one part.
pub(crate) const PART_BYTES_MAX: usize = 4 << 20;
/// The most tensors in one part. Their descriptions fit into an attachment.
pub(crate) const BATCH_MAX: usize = 64;
/// The most bytes of an outcome's or an end's text.
pub(crate) const TEXT_BYTES_MAX: usize = 512;
/// The most patterns in a `Hello`.
pub(crate) const PATTERNS_MAX: usize = 16;
/// The most bytes of a sample's metadata.
const METADATA_BYTES_MAX: usize = 4096;
/// The most of a sample that goes with others in one part.
pub(crate) const BATCH_METADATA_BYTES_MAX: usize = 256;
/// The most bytes of the name of a machine.
const NODE_BYTES_MAX: usize = 64;

/// A run of a bridge, or of a lane: random.
pub(crate) type Id = [u8; 16];

/// An id as it stands in keys.
pub(crate) fn hex(id: &Id) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The reverse of [`hex`].
pub(crate) fn id_of(text: &str) -> Option<Id> {
    let mut id = Id::default();
    if text.len() != 2 * id.len() || !text.is_ascii() {
        return None;
    }
    for (byte, digits) in id.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(id)
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// The sender's machine, and what it takes. Sent until the other end's has come.
    Hello(Hello),
    /// A lane begins.
    Begin { lane: Id, purpose: Purpose },
    /// The other end takes the lane: `parts` is the number of parts that may be sent in all, and
    /// no sample up to number `after` is wanted.
    Ready { lane: Id, after: u64, parts: u64 },
    /// More parts may be sent: the number in all.
    Credit { lane: Id, parts: u64 },
    /// A part of a tensor.
    Part(Part),
    /// The sender of a lane ends it, after all its parts.
    End { lane: Id, end: End },
    /// The receiver of a lane ends it.
    Stop { lane: Id, reason: String },
    /// The receiver of a lane of jobs has that many workers.
    Workers { lane: Id, count: u32 },
    /// The sender of a lane of jobs took a job's outcome, or wants none any more.
    Taken { lane: Id, number: u64 },
    /// The receiver of samples waits, without a lane, for this incarnation of a source.
    Waits { name: String, generation: Id },
    /// It has ended for that receiver: nobody has its name here.
    Gone { name: String, generation: Id },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The machine's name, for people.
    pub(crate) node: String,
    /// The same for every run of a bridge in one domain.
    pub(crate) home: u64,
    /// Patterns of the names that the sender imports.
    pub(crate) imports: Vec<String>,
    /// Patterns of the queues that the sender does jobs of.
    pub(crate) queues: Vec<String>,
    /// Whether the other end's `Hello` has come.
    pub(crate) has_yours: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Purpose {
    /// The samples of a publisher, by its name and the random bytes of their source.
    Samples { name: String, generation: Id },
    /// The jobs of a queue.
    Jobs { name: String },
    /// The outcomes of the jobs of another lane.
    Results { jobs: Id },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Part {
    pub(crate) lane: Id,
    /// From 1 in each lane.
    pub(crate) number: u64,
    /// Of the first byte in the tensor.
    pub(crate) offset: u64,
    /// With the first part of a tensor.
    pub(crate) tensor: Option<Tensor>,
    /// Samples behind that one. If there are any, the part has all of them whole, behind each other.
    pub(crate) more: Vec<Tensor>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tensor {
    pub(crate) tag: Tag,
    /// `None`: that of the tensor before it in the same part.
    shape: Option<Shape>,
    pub(crate) metadata: Vec<u8>,
    /// The names and layouts of the tensors in its bytes, if it is several.
    several: Vec<(String, Shape)>,
}

/// A layout, as its sender states it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Shape {
    dtype: DType,
    shape: Vec<u64>,
    strides: Vec<i64>,
    offset: u64,
    bytes: u64,
}

/// What a tensor is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Tag {
    /// A sample with its publisher's number.
    Sample { sequence: u64 },
    /// A job's input, with its number in the exporter's run.
    Job { number: u64 },
    /// A job's result.
    Result { number: u64 },
    /// No result: the words of the worker, and whether another attempt is useless. It has no bytes.
    Failed {
        number: u64,
        reason: String,
        is_final: bool,
    },
}

/// Why the sender of a lane ended it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum End {
    /// The source closed.
    Closed,
    /// The source is proven dead.
    Died,
    /// The policy `fail` ended the lane.
    Failed(String),
    /// This end of the lane ends, and says nothing of the source.
    Paused,
}

impl Shape {
    fn new(layout: &Layout) -> Shape {
        Shape {
            dtype: layout.dtype(),
            shape: layout.shape().to_vec(),
            strides: layout.strides().to_vec(),
            offset: layout.offset(),
            bytes: layout.bytes(),
        }
    }

    /// The layout, checked like one of this process.
    fn layout(&self) -> Result<Layout, String> {
        let layout = Layout::strided(self.dtype, &self.shape, &self.strides, self.offset);
        let layout = layout.map_err(|error| error.to_string())?;
        if layout.bytes() != self.bytes {
            return Err(format!(
                "{} bytes for a layout of {}",
                self.bytes,
                layout.bytes()
            ));
        }
        Ok(layout)
    }
}

impl Tensor {
    pub(crate) fn new(tag: Tag, layout: &Layout, metadata: &[u8]) -> Tensor {
        Tensor {
            tag,
            shape: Some(Shape::new(layout)),
            metadata: metadata.to_vec(),
            several: Vec::new(),
        }
    }

    /// Says that its bytes are these tensors'.
    pub(crate) fn with_several(mut self, parts: &[warpipe::Part]) -> Tensor {
        let described = |part: &warpipe::Part| (part.name.to_string(), Shape::new(&part.layout));
        self.several = parts.iter().map(described).collect();
        self
    }

    /// The tensors in its bytes, which have this layout. Theirs are checked, and fill it.
    pub(crate) fn several(&self, whole: &Layout) -> Result<Vec<(&str, Layout)>, String> {
        let several = self.several.iter();
        let several = several.map(|it| Ok((&*it.0, it.1.layout()?)));
        let several: Vec<(&str, Layout)> = several.collect::<Result<_, String>>()?;
        let filled = warpipe::lay_out_parts(several.iter().map(|(_, layout)| layout))
            .and_then(|(_, bytes)| Layout::bytes_only(bytes));
        match filled {
            Ok(filled) if several.is_empty() || filled == *whole => Ok(several),
            _ => Err(format!(
                "several tensors do not fill {} bytes",
                whole.bytes()
            )),
        }
    }

    /// Says that its bytes are these tensors', whether they fill them or not.
    #[cfg(test)]
    pub(crate) fn claiming_several(mut self, parts: &[(&str, u64)]) -> Tensor {
        let claimed = |&(name, bytes): &(&str, u64)| {
            let layout = Layout::bytes_only(bytes).unwrap();
            (name.to_owned(), Shape::new(&layout))
        };
        self.several = parts.iter().map(claimed).collect();
        self
    }

    /// One with the layout of the tensor before it in the same part.
    pub(crate) fn of_same_layout(tag: Tag, metadata: &[u8]) -> Tensor {
        Tensor {
            tag,
            shape: None,
            metadata: metadata.to_vec(),
            several: Vec::new(),
        }
    }

    /// The layout, checked. `before` is that of the tensor before it in the same part.
    pub(crate) fn layout(&self, before: Option<&Layout>) -> Result<Layout, String> {
        match &self.shape {
            Some(shape) => shape.layout(),
            None => before.cloned().ok_or("a tensor without a layout".into()),
        }
    }

    fn is_bounded(&self) -> bool {
        let is_bounded = |it: &Shape| it.shape.len() <= RANK_MAX && it.strides.len() <= RANK_MAX;
        self.metadata.len() <= METADATA_BYTES_MAX
            && self.shape.iter().all(is_bounded)
            && self.several.len() <= PARTS_MAX
            && self
                .several
                .iter()
                .all(|(name, shape)| name.len() <= PART_NAME_BYTES_MAX && is_bounded(shape))
            && match &self.tag {
                Tag::Failed { reason, .. } => reason.len() <= TEXT_BYTES_MAX,
                Tag::Sample { .. } | Tag::Job { .. } | Tag::Result { .. } => true,
            }
    }
}

impl Message {
    fn is_bounded(&self) -> bool {
        match self {
            Message::Hello(hello) => {
                hello.imports.len() <= PATTERNS_MAX
                    && hello.queues.len() <= PATTERNS_MAX
                    && hello.node.len() <= NODE_BYTES_MAX
            }
            Message::Begin {
                purpose: Purpose::Samples { name, .. } | Purpose::Jobs { name },
                ..
            }
            | Message::Waits { name, .. }
            | Message::Gone { name, .. } => name.len() <= NAME_BYTES_MAX,
            Message::Part(part) => {
                part.more.len() < BATCH_MAX
                    && part.tensor.iter().chain(&part.more).all(Tensor::is_bounded)
            }
            Message::End {
                end: End::Failed(text),
                ..
            }
            | Message::Stop { reason: text, .. } => text.len() <= TEXT_BYTES_MAX,
            Message::Begin {
                purpose: Purpose::Results { .. },
                ..
            }
            | Message::Ready { .. }
            | Message::Credit { .. }
            | Message::End { .. }
            | Message::Workers { .. }
            | Message::Taken { .. } => true,
        }
    }

    /// As the attachment of a Zenoh sample.
    pub(crate) fn encode(&self, from: &Id) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(160);
        bytes.push(VERSION);
        bytes.extend_from_slice(from);
        // Types without maps or custom code: a vector takes them all.
        postcard::to_extend(self, bytes).expect("a message can be encoded")
    }

    /// The sender and the message; `None` for anything but a message of this version.
    pub(crate) fn decode(bytes: &[u8]) -> Option<(Id, Message)> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return None;
        }
        let (&[VERSION], rest) = bytes.split_first_chunk::<1>()? else {
            return None;
        };
        let (from, rest) = rest.split_first_chunk::<16>()?;
        let (message, left) = postcard::take_from_bytes::<Message>(rest).ok()?;
        (left.is_empty() && message.is_bounded()).then_some((*from, message))
    }
}

/// A text that fits into a message.
pub(crate) fn bounded(text: &str) -> String {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// Whether a name is one that bridges make: such a name goes over no bridge.
pub(crate) fn is_made_by_bridges(name: &str) -> bool {
    name.starts_with(STATUS_PREFIX) || name.starts_with("remote/")
}

/// A machine's name that fits into a message and into the name of an endpoint.
pub(crate) fn node_name(text: &str) -> String {
    let harmless = |c: char| {
        if c.is_ascii_alphanumeric() || c == '-' {
            c
        } else {
            '-'
        }
    };
    let name: String = text.chars().take(NODE_BYTES_MAX).map(harmless).collect();
    if name.is_empty() { "host".into() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::PATTERN_BYTES_MAX;

    fn examples() -> Vec<Message> {
        let layout = Layout::contiguous(DType::F32, &[2, 3]).unwrap();
        let tensor = Tensor::new(Tag::Sample { sequence: 7 }, &layout, b"meta");
        let part = Part {
            lane: [1; 16],
            number: 1,
            offset: 0,
            tensor: Some(tensor.clone()),
            more: Vec::new(),
        };
        let layout = Layout::contiguous(DType::F8_E4M3B11FNUZ, &[1 << 7; RANK_MAX]).unwrap();
        let sample = Tag::Sample { sequence: 1 << 62 };
        let long = Tensor::new(sample.clone(), &layout, &[b'm'; BATCH_METADATA_BYTES_MAX]);
        let several = Tensor {
            several: vec![("n".repeat(20), Shape::new(&layout)); PARTS_MAX],
            ..Tensor::new(sample, &layout, &[b'm'; METADATA_BYTES_MAX])
        };
        let one_of_several = Part {
            tensor: Some(several),
            ..part.clone()
        };
        let several = Part {
            number: u64::MAX,
            more: vec![long; BATCH_MAX - 1],
            ..part.clone()
        };
        let same = Part {
            more: vec![Tensor::of_same_layout(Tag::Sample { sequence: 8 }, b"")],
            ..part.clone()
        };
        let patterns = vec!["a".repeat(PATTERN_BYTES_MAX); PATTERNS_MAX];
        let hello = Hello {
            node: "n".repeat(NODE_BYTES_MAX),
            home: u64::MAX,
            imports: patterns.clone(),
            queues: patterns,
            has_yours: true,
        };
        vec![
            Message::Part(part),
            Message::Part(several),
            Message::Part(one_of_several),
            Message::Part(same),
            Message::Hello(hello),
            Message::Credit {
                lane: [2; 16],
                parts: 9,
            },
            Message::Stop {
                lane: [3; 16],
                reason: "full".into(),
            },
        ]
    }

    #[test]
    fn a_message_is_read_as_it_was_written() {
        for message in examples() {
            let bytes = message.encode(&[9; 16]);
            assert_eq!(Message::decode(&bytes), Some(([9; 16], message)));
        }
    }

    #[test]
    fn cut_long_and_altered_messages_are_refused_or_read_within_their_bounds() {
        let mut rng = fastrand::Rng::with_seed(5);
        for message in examples() {
            let bytes = message.encode(&[9; 16]);
            for length in (0..bytes.len()).rev().take(512) {
                assert_eq!(Message::decode(&bytes[..length]), None);
            }
            let longer = [&bytes[..], &[0]].concat();
            assert_eq!(Message::decode(&longer), None);
            for _ in 0..2000 {
                let mut altered = bytes.clone();
                let at = rng.usize(..altered.len());
                altered[at] = rng.u8(..);
                if let Some((_, message)) = Message::decode(&altered) {
                    assert!(message.is_bounded());
                    if let Message::Part(Part {
                        tensor: Some(tensor),
                        ..
                    }) = message
                    {
                        let _ = tensor.layout(None);
                    }
                }
            }
        }
        assert_eq!(Message::decode(&vec![VERSION; MESSAGE_BYTES_MAX + 1]), None);
        let stop = Message::Stop {
            lane: [0; 16],
            reason: "a".repeat(TEXT_BYTES_MAX + 1),
        };
        assert_eq!(Message::decode(&stop.encode(&[0; 16])), None);
    }

    #[test]
    fn an_id_in_a_key_is_the_same_id() {
        let id = [0, 1, 0xfe, 255, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        assert_eq!(id_of(&hex(&id)), Some(id));
        assert_eq!((id_of("12"), id_of(&"é".repeat(16))), (None, None));
    }
}
