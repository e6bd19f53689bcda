//! One name, imported from one peer: a lane from the peer, and an ordinary publisher here.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use warpipe::{
    DeviceKind, Error as Local, Layout, LimitFault, NameFault, Policy as LocalPolicy, Publisher,
    PublisherOptions, SampleMut, Stream,
};
use zenoh::bytes::ZBytes;

use crate::error::Result;
use crate::lane::{Assembly, Ending, LaneCounts, LaneReceiver, Payload, SLICE, Target};
use crate::message::{End, Id, Message, Part, Tag, Tensor, bounded};
use crate::options::Options;

/// The streams of a publisher on a device.
const STREAMS: usize = 4;
/// How often a name that is taken is tried again, a slice apart.
const TAKEN_ATTEMPTS: u32 = 10;

/// An imported name. It outlives its lanes: when a peer comes back, the same publisher goes on.
#[derive(Debug)]
pub(crate) struct Import {
    pub(crate) name: String,
    /// The name of the exporter's machine.
    pub(crate) node: String,
    /// Held by the lane's thread while it runs.
    published: Mutex<Option<Published>>,
    /// The name that its publisher has here.
    local_name: Mutex<String>,
}

/// The publisher for one incarnation of the source.
#[derive(Debug)]
struct Published {
    publisher: Publisher,
    generation: Id,
    /// The number of the last sample.
    last: u64,
    /// Samples take turns: on a device each waits for its own copy, and for no other one's.
    streams: Vec<Stream>,
    /// That of the present sample.
    turn: usize,
}

/// How the end of a lane leaves its name.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Left {
    /// The source has ended, and so has the publisher here.
    Ended(End),
    /// The source may live: the publisher here waits for it.
    Waiting(String),
}

impl Import {
    pub(crate) fn new(name: &str, node: &str) -> Import {
        Import {
            name: name.into(),
            node: node.into(),
            published: Mutex::default(),
            local_name: Mutex::new(name.into()),
        }
    }

    /// The name that its publisher has here: its own, or `remote/HOST/NAME`.
    pub(crate) fn local_name(&self) -> String {
        let name = self.local_name.lock();
        name.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The incarnation of the source for which a publisher waits here without a lane.
    pub(crate) fn waits_for(&self) -> Option<Id> {
        let published = self.published.try_lock().ok()?;
        published.as_ref().map(|published| published.generation)
    }

    /// That incarnation has ended, and so does the publisher here, if it waits for it.
    pub(crate) fn end(&self, generation: Id) -> bool {
        let Ok(mut published) = self.published.try_lock() else {
            return false;
        };
        let waits = published
            .as_ref()
            .is_some_and(|it| it.generation == generation);
        if waits {
            *published = None;
        }
        waits
    }

    /// Whether its publisher waits here: no lane runs.
    pub(crate) fn is_published(&self) -> bool {
        self.published
            .try_lock()
            .is_ok_and(|published| published.is_some())
    }

    /// Publishes what a lane brings, until it ends.
    pub(crate) fn run(&self, options: &Options, lane: &LaneReceiver, generation: Id) -> Left {
        // The thread of the lane before this one ends within a slice: its lane was cut.
        let mut published = self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let ending = match self.publish_all(options, lane, generation, &mut published) {
            _ if lane.is_cut() => Ending::Cut,
            Ok(ending) => ending,
            Err(error) => Ending::Fault(error.to_string()),
        };
        let stop = |reason: &str| {
            let (lane_id, reason) = (lane.lane, bounded(reason));
            let _ = lane.send(&Message::Stop {
                lane: lane_id,
                reason,
            });
        };
        match ending {
            Ending::Sender(End::Paused) => Left::Waiting("the exporter paused".into()),
            Ending::Sender(end) => {
                *published = None;
                Left::Ended(end)
            }
            Ending::Cut => {
                stop("the lane was replaced or its peer was unreachable");
                Left::Waiting("the peer is unreachable".into())
            }
            Ending::Fault(reason) => {
                stop(&reason);
                Left::Waiting(reason)
            }
        }
    }

    fn publish_all(
        &self,
        options: &Options,
        lane: &LaneReceiver,
        generation: Id,
        published: &mut Option<Published>,
    ) -> Result<Ending> {
        // A lane that has taken its place may have begun a publisher.
        if lane.is_cut() {
            return Ok(Ending::Cut);
        }
        if published
            .as_ref()
            .is_some_and(|it| it.generation != generation)
        {
            // Another incarnation of the source is another one here.
            *published = None;
        }
        let published = match published {
            Some(published) => published,
            None => published.insert(self.publish(options, lane, generation)?),
        };
        lane.accept(published.last)?;
        let mut assembly = None;
        loop {
            let (part, payload) = match lane.next() {
                Ok(Some(part)) => part,
                Ok(None) => continue,
                Err(ending) => return Ok(ending),
            };
            if lane.is_cut() {
                return Ok(Ending::Cut);
            }
            if let Some(ending) = published.take(options, lane, &mut assembly, part, &payload)? {
                return Ok(ending);
            }
            drop(payload);
            lane.taken()?;
        }
    }

    /// Takes the name here, or `remote/HOST/NAME` where another process has it.
    fn publish(&self, options: &Options, lane: &LaneReceiver, generation: Id) -> Result<Published> {
        let build = |name: &str| {
            Publisher::new(
                name,
                PublisherOptions {
                    memory_limit: options.memory_limit,
                    depth: options.depth,
                    history: options.history.min(options.depth),
                    policy: LocalPolicy::Block { timeout: SLICE },
                    loan_timeout: SLICE,
                    forwards: Some(generation),
                    ..options.domain.on(&options.device)
                },
            )
        };
        let mut attempts = 0;
        let publisher = loop {
            match build(&self.name) {
                // A bridge that was killed holds its names until the system has cleared it away.
                Err(Local::Name(NameFault::Taken { .. }))
                    if attempts < TAKEN_ATTEMPTS && !lane.is_cut() =>
                {
                    lane.wait_for_cut(SLICE);
                    attempts += 1;
                }
                Err(Local::Name(NameFault::Taken { .. })) => {
                    break build(&format!("remote/{}/{}", self.node, self.name))?;
                }
                other => break other?,
            }
        };
        *self
            .local_name
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = publisher.name().to_owned();
        let count = match options.device.info().id.kind {
            DeviceKind::Host => 1,
            _ => STREAMS,
        };
        let streams = (0..count).map(|_| options.device.stream());
        Ok(Published {
            streams: streams.collect::<warpipe::Result<_>>()?,
            turn: 0,
            publisher,
            generation,
            last: 0,
        })
    }
}

impl Published {
    /// Takes a part: of one tensor, or with several whole ones.
    fn take(
        &mut self,
        options: &Options,
        lane: &LaneReceiver,
        assembly: &mut Option<Assembly<Target<SampleMut>>>,
        mut part: Part,
        payload: &ZBytes,
    ) -> Result<Option<Ending>> {
        if !part.more.is_empty() {
            return self.take_several(options, lane, assembly, part, payload);
        }
        let fault = |reason: String| Ok(Some(Ending::Fault(reason)));
        if let Some(tensor) = part.tensor.take() {
            if assembly.is_some() {
                return fault("a tensor began before the one before it was whole".into());
            }
            let layout = match tensor.layout(None) {
                Ok(layout) => layout,
                Err(reason) => return fault(reason),
            };
            match self.begin(options, lane, tensor, layout)? {
                Ok(begun) => *assembly = Some(begun),
                Err(ending) => return Ok(Some(ending)),
            }
        }
        let Some(current) = assembly else {
            return fault("a part came without its tensor".into());
        };
        let length = payload.len() as u64;
        if let Err(reason) = current.add(&part, length) {
            return fault(reason);
        }
        self.place(
            options,
            current,
            part.offset,
            length,
            &mut Payload::new(payload),
        )?;
        if !current.is_whole() {
            return Ok(None);
        }
        match assembly.take() {
            Some(whole) => self.send(lane, whole),
            None => Ok(None),
        }
    }

    /// Takes a part with several whole tensors.
    fn take_several(
        &mut self,
        options: &Options,
        lane: &LaneReceiver,
        assembly: &Option<Assembly<Target<SampleMut>>>,
        part: Part,
        payload: &ZBytes,
    ) -> Result<Option<Ending>> {
        let fault = |reason: String| Ok(Some(Ending::Fault(reason)));
        let Some(first) = part
            .tensor
            .filter(|_| part.offset == 0 && assembly.is_none())
        else {
            return fault("several tensors came behind a piece of one".into());
        };
        let (mut tensors, mut before, mut bytes) = (Vec::new(), None, 0u64);
        for tensor in std::iter::once(first).chain(part.more) {
            let layout = match tensor.layout(before.as_ref()) {
                Ok(layout) => layout,
                Err(reason) => return fault(reason),
            };
            bytes = bytes.saturating_add(layout.bytes());
            before = Some(layout);
            tensors.push((tensor, layout));
        }
        if bytes != payload.len() as u64 {
            return fault("several tensors came with another number of bytes".into());
        }
        let mut payload = Payload::new(payload);
        for (tensor, layout) in tensors {
            let whole = match self.begin(options, lane, tensor, layout)? {
                Ok(whole) => whole,
                Err(ending) => return Ok(Some(ending)),
            };
            self.place(options, &whole, 0, layout.bytes(), &mut payload)?;
            if let Some(ending) = self.send(lane, whole)? {
                return Ok(Some(ending));
            }
        }
        Ok(None)
    }

    /// Takes a tensor that begins, and waits for its slot: none for a sample that came before.
    fn begin(
        &mut self,
        options: &Options,
        lane: &LaneReceiver,
        tensor: Tensor,
        layout: Layout,
    ) -> Result<std::result::Result<Assembly<Target<SampleMut>>, Ending>> {
        let Tag::Sample { sequence } = tensor.tag else {
            let reason = "a lane of samples brought something else".into();
            return Ok(Err(Ending::Fault(reason)));
        };
        let bytes = layout.bytes();
        if sequence == 0 || sequence > 1 << 62 || bytes > options.tensor_bytes_max {
            let reason = format!("sample {sequence} of {bytes} bytes is not allowed");
            return Ok(Err(Ending::Fault(reason)));
        }
        let slot = if sequence <= self.last {
            LaneCounts::add(&lane.counts.repeated, 1);
            None
        } else {
            // Before memory is taken for them.
            let several = match tensor.several(&layout) {
                Ok(several) => several,
                Err(reason) => return Ok(Err(Ending::Fault(reason))),
            };
            match self.loan(lane, &layout, &several) {
                Ok(Some(slot)) => Some(slot),
                Ok(None) => return Ok(Err(Ending::Cut)),
                Err(Local::Argument { found, allowed, .. }) if !several.is_empty() => {
                    let reason = format!("several tensors: {found}; allowed: {allowed}");
                    return Ok(Err(Ending::Fault(reason)));
                }
                Err(error) => return Err(error.into()),
            }
        };
        self.turn = (self.turn + 1) % self.streams.len();
        let stream = self.streams[self.turn].clone();
        Ok(Ok(Assembly::new(tensor, layout, Target { slot, stream })))
    }

    /// Copies `length` bytes of the payload to their place in the tensor's slot: they fit.
    fn place(
        &self,
        options: &Options,
        tensor: &Assembly<Target<SampleMut>>,
        offset: u64,
        length: u64,
        payload: &mut Payload<'_>,
    ) -> Result<()> {
        let Some(loan) = &tensor.target.slot else {
            payload.skip(length);
            return Ok(());
        };
        // SAFETY: the caller found the range inside the slot, which is this loan's alone until it
        // is sent, behind the same stream.
        unsafe {
            let address = loan.slot_ptr() + offset;
            payload.upload(&options.device, &tensor.target.stream, address, length)
        }
    }

    /// Waits for a slot: what the subscribers here hold is what holds up the lane. `None` when the
    /// lane was cut.
    fn loan(
        &self,
        lane: &LaneReceiver,
        layout: &Layout,
        several: &[(&str, Layout)],
    ) -> warpipe::Result<Option<SampleMut>> {
        while !lane.is_cut() {
            let loan = match several {
                [] => self.publisher.loan(layout),
                several => self.publisher.loan_parts(several),
            };
            match loan {
                Ok(loan) => {
                    lane.wants_memory(None);
                    return Ok(Some(loan));
                }
                Err(Local::Limit(LimitFault::Memory { bytes, limit, .. })) if bytes <= limit => {
                    lane.wants_memory(Some(bytes));
                }
                Err(Local::Timeout { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    fn send(
        &mut self,
        lane: &LaneReceiver,
        mut whole: Assembly<Target<SampleMut>>,
    ) -> Result<Option<Ending>> {
        let (Tag::Sample { sequence }, Some(loan)) = (&whole.tag, &mut whole.target.slot) else {
            return Ok(None);
        };
        let sequence = *sequence;
        if let Err(error) = loan.set_metadata(&whole.metadata) {
            return Ok(Some(Ending::Fault(error.to_string())));
        }
        if self.last > 0 {
            LaneCounts::add(&lane.counts.missing, sequence - self.last - 1);
        }
        self.publisher.skip_to(sequence)?;
        while let Some(loan) = whole.target.slot.take() {
            let Err(unsent) = loan.send(&whole.target.stream) else {
                break;
            };
            whole.target.slot = unsent.returned.map(|sample| *sample);
            match unsent.error {
                Local::Timeout { .. } if whole.target.slot.is_some() && !lane.is_cut() => {}
                Local::Timeout { .. } => return Ok(Some(Ending::Cut)),
                error => return Err(error.into()),
            }
        }
        self.last = sequence;
        lane.counts.tensors.fetch_add(1, Ordering::Relaxed);
        LaneCounts::add(&lane.counts.bytes, whole.layout.bytes());
        Ok(None)
    }
}
