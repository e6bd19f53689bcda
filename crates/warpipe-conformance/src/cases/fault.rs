//! Failed device calls: every call of every method that a step uses, failed once.
//!
//! Methods that only release (`release`, `unregister`, `destroy_...`) are left out: one that is
//! failed before it does anything has released nothing, and no roll-back can change that.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::backend::testing::{Failing, Wrapped};
use warpipe::{
    DType, Device, Error, Layout, Loss, Publisher, PublisherOptions, Sample, SampleMut, Stream,
    Subscriber, SubscriberOptions,
};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::{ErrorCounters, Payload};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a call refused while a publisher is built leaks nothing, and the next build succeeds",
        publisher,
    ),
    Case::new(
        "a call refused while a subscriber is built leaks nothing, and the next build succeeds",
        subscriber,
    ),
    Case::new(
        "a driver call refused in a loan leaves both sides usable",
        loan,
    ),
    Case::new(
        "a driver call refused in a send loses that sample alone, and its subscriber gets an error",
        send,
    ),
    Case::new(
        "a driver call refused in a receive loses no sample",
        receive,
    ),
    Case::new(
        "a driver call refused in a release leaves both sides usable",
        release,
    ),
];

const WORDS: u64 = 256;
const METHODS: &[&str] = &[
    "allocate",
    "export",
    "import",
    "register",
    "create_stream",
    "batch",
    "copy_rows",
    "upload",
    "download",
    "launch",
    "preload",
    "call",
    "query",
    "create_event",
    "record_event",
    "wait_event",
    "query_event",
];
/// More calls of one method than any step makes.
const CALLS_MAX: u64 = 32;

/// One thing that the library does; each builds on the ones before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Publish,
    Subscribe,
    Loan,
    Send,
    Receive,
    Release,
}

const STEPS: &[Step] = &[
    Step::Publish,
    Step::Subscribe,
    Step::Loan,
    Step::Send,
    Step::Receive,
    Step::Release,
];

/// The device of one side, which fails on order.
struct Side {
    hook: Arc<Wrapped<Failing>>,
    device: Device,
    stream: Stream,
}

impl Side {
    fn new(context: &Context) -> Result<Side> {
        let hook = Wrapped::new(context.device.backend().clone(), Failing::default());
        let device = Device::from_backend(hook.clone());
        Ok(Side {
            hook,
            stream: device.stream()?,
            device,
        })
    }
}

/// A channel between two such sides, as far as it has come. Fields are dropped in this order.
struct Flow<'a> {
    context: &'a Context,
    loan: Option<SampleMut>,
    sample: Option<Sample>,
    subscriber: Option<Subscriber>,
    publisher: Option<Publisher>,
    error_counters: ErrorCounters,
    /// The publisher's and the subscriber's.
    sides: [Side; 2],
}

impl<'a> Flow<'a> {
    fn new(context: &'a Context) -> Result<Flow<'a>> {
        let sides = [Side::new(context)?, Side::new(context)?];
        let error_counters = context.error_counters()?;
        Ok(Flow {
            context,
            loan: None,
            sample: None,
            subscriber: None,
            publisher: None,
            error_counters,
            sides,
        })
    }

    fn take(&mut self, step: Step) -> Result<()> {
        let [out, back] = &self.sides;
        match step {
            Step::Publish => {
                self.publisher = Some(Publisher::new(
                    "fault",
                    PublisherOptions {
                        device: Some(out.device.clone()),
                        history: 1,
                        ..self.context.domain.on(&self.context.device)
                    },
                )?);
            }
            Step::Subscribe => {
                self.subscriber = Some(Subscriber::open(
                    "fault",
                    SubscriberOptions {
                        device: Some(back.device.clone()),
                        ..self.context.domain.on(&self.context.device)
                    },
                    std::time::Duration::ZERO,
                )?);
            }
            Step::Loan => {
                let publisher = self.publisher.as_ref().context("published")?;
                self.loan = Some(publisher.loan(&Layout::contiguous(DType::U64, &[WORDS])?)?);
            }
            Step::Send => {
                let sent = self.loan.take().context("loaned")?.send(&out.stream);
                sent.map_err(|failed| {
                    self.loan = failed.returned.map(|sample| *sample);
                    failed.error
                })?;
            }
            Step::Receive => {
                self.sample = Some(
                    self.subscriber
                        .as_mut()
                        .context("subscribed")?
                        .receive(&back.stream, PATIENCE)?,
                )
            }
            Step::Release => self.sample.take().context("received")?.finish(PATIENCE)?,
        }
        Ok(())
    }

    /// Fills the loan and, of what was received, checks the words: the user's work between the
    /// steps.
    fn work(&mut self, seed: u64) -> Result<()> {
        if let Some(loan) = &mut self.loan {
            Payload::of(WORDS, seed).fill(loan, &self.sides[0].stream)?;
        }
        if let Some(sample) = &self.sample {
            let check = self
                .error_counters
                .check_sample(sample)?
                .context("a mark")?;
            self.sides[1].stream.synchronize(PATIENCE)?;
            ensure!(
                self.error_counters.wrong_words(check) == 0,
                "sample {} has wrong words",
                sample.sequence()
            );
        }
        Ok(())
    }

    fn go(&mut self, steps: &[Step], seed: u64) -> Result<()> {
        steps.iter().try_for_each(|&step| {
            let result = self.take(step);
            if let Err(error) = result {
                self.subscribe_again(step, error)
                    .with_context(|| format!("{step:?}"))?;
            }
            self.work(seed)
        })
    }
}

impl Flow<'_> {
    /// A new region comes when it comes, and when it cannot be mapped the link is over; that is
    /// reported by the next receive. A new link, and its history, is the way on.
    fn subscribe_again(&mut self, step: Step, error: anyhow::Error) -> Result<()> {
        ensure!(
            step == Step::Receive && is_injected(&error) && error.to_string().contains("import"),
            error
        );
        self.take(Step::Subscribe)?;
        self.take(Step::Receive)
    }

    /// A sample is lost if the device refused its completion, and its subscriber is notified; the
    /// next one is not lost.
    fn send_another(&mut self) -> Result<()> {
        let lost = self
            .subscriber
            .as_mut()
            .context("subscribed")?
            .receive(&self.sides[1].stream, PATIENCE)?;
        match lost.finish(PATIENCE) {
            Err(Error::Lost(Loss::Sample { .. })) => {}
            other => bail!("a sample that was refused gave {other:?}"),
        }
        self.go(&[Step::Loan, Step::Send], 1)
    }
}

/// Whether the error says that the fault was injected, here or at the other side of a handshake.
fn is_injected(error: &anyhow::Error) -> bool {
    match error.downcast_ref::<Error>() {
        Some(Error::Driver {
            code: Error::INJECTED,
            ..
        }) => true,
        Some(error @ Error::Handshake { .. }) => error.to_string().contains("injected"),
        _ => false,
    }
}

/// Fails each call of each method that `step` makes on either side, each time on a fresh channel;
/// then takes the step again and sees that everything works.
fn refuse(context: &Context, step: Step) -> Result<()> {
    let at = STEPS
        .iter()
        .position(|&other| other == step)
        .context("a step")?;
    let (before, after) = (&STEPS[..at], &STEPS[at + 1..]);
    let guard = context.guard();
    let mut refusals = 0;
    for (side, method) in [0, 1]
        .into_iter()
        .flat_map(|side| METHODS.iter().map(move |&method| (side, method)))
    {
        for call in 1..=CALLS_MAX {
            let mut flow = Flow::new(context)?;
            if at > 1 {
                // Not the first message: a link that has seen one knows which is due.
                flow.go(STEPS, 9)?;
                flow.go(&before[2..], 1)?;
            } else {
                flow.go(before, 1)?;
            }
            flow.sides[side].hook.hook().aim(method, call);
            let result = flow.take(step);
            // Disarmed, if it was not struck.
            let struck = flow.sides[side].hook.hook().has_struck();
            flow.sides[side].hook.hook().aim("none", 0);
            let words = || format!("call {call} of {method} failed on side {side}");
            again(&mut flow, step, result)
                .and_then(|()| flow.go(after, 1))
                .with_context(words)?;
            flow.go(&STEPS[2..], 2)
                .with_context(|| format!("{}, on the next message", words()))?;
            drop(flow);
            guard.settles().with_context(words)?;
            if !struck {
                break;
            }
            refusals += 1;
        }
    }
    context.figure("refusals", refusals);
    Ok(())
}

/// After a refusal takes the step again.
fn again(flow: &mut Flow<'_>, step: Step, result: Result<()>) -> Result<()> {
    if let Err(error) = result {
        ensure!(
            is_injected(&error),
            "another error than the one injected: {error:#}"
        );
        match step {
            // A release that fails is tried once more by the sample's own drop.
            Step::Release => {}
            Step::Receive if error.to_string().contains("import") => {
                flow.subscribe_again(step, error)?
            }
            Step::Send if flow.loan.is_none() => flow.send_another().context("another one")?,
            _ => flow.take(step).context("the second time")?,
        }
    }
    flow.work(1)
}

fn publisher(context: &Context) -> Result<()> {
    refuse(context, Step::Publish)
}

fn subscriber(context: &Context) -> Result<()> {
    refuse(context, Step::Subscribe)
}

fn loan(context: &Context) -> Result<()> {
    refuse(context, Step::Loan)
}

fn send(context: &Context) -> Result<()> {
    refuse(context, Step::Send)
}

fn receive(context: &Context) -> Result<()> {
    refuse(context, Step::Receive)
}

fn release(context: &Context) -> Result<()> {
    refuse(context, Step::Release)
}
