//! A channel with one subscriber that stays and one that joins late in every turn.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use warpipe::{
    DType, Error, Layout, Loss, Publisher, PublisherOptions, Sample, StateFault, Stream, Subscriber,
};

use super::{Site, Workload};
use crate::payload::{ErrorCounters, Payload, PayloadMark};

struct Channel {
    /// None once its link was over, and it said so.
    subscriber: Option<Subscriber>,
    publisher: Publisher,
    sending: Stream,
    receiving: Stream,
    error_counters: ErrorCounters,
    /// Samples that were not received, by seed, and whether the send succeeded.
    due: BTreeMap<u64, bool>,
    /// The last one that came.
    last: u64,
    /// Samples that were received and may come once more, by a new link.
    history: Option<u64>,
    site: Site,
}

/// More than fits in what a publisher has at first.
const LARGE: u64 = 400_000;
const SMALL: u64 = 64;

pub(super) fn open(site: Site) -> Result<Box<dyn Workload>> {
    let context = &site.context;
    let (sending, receiving) = (context.stream()?, context.stream()?);
    let error_counters = site.apart(|| Ok(context.error_counters()?))?;
    let options = PublisherOptions {
        history: 1,
        loan_timeout: site.patience,
        ..context.domain.on(&context.device)
    };
    let publisher = Publisher::new(&site.name_of("channel"), options)?;
    let subscriber = Some(join(&site)?);
    Ok(Box::new(Channel {
        subscriber,
        publisher,
        sending,
        receiving,
        error_counters,
        due: BTreeMap::new(),
        last: 0,
        history: None,
        site,
    }))
}

fn join(site: &Site) -> Result<Subscriber> {
    Ok(site.context.subscriber(&site.name_of("channel"))?)
}

impl Channel {
    /// A link that is over, as where memory cannot be imported, has taken its samples along. Its
    /// end is reported, and a new one begins with the history.
    fn join_again(&mut self) -> Result<()> {
        if self.subscriber.is_none() {
            self.subscriber = Some(join(&self.site)?);
            self.due.values_mut().for_each(|was_sent| *was_sent = false);
            self.history = Some(self.last);
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<Sample> {
        let Some(subscriber) = &mut self.subscriber else {
            bail!("it is subscribed")
        };
        let received = subscriber.receive(&self.receiving, self.site.patience);
        if matches!(received, Err(Error::State(StateFault::LinkClosed { .. }))) {
            self.subscriber = None;
        }
        Ok(received?)
    }

    fn send(&mut self, seed: u64) -> Result<()> {
        let words = if seed.is_multiple_of(2) { LARGE } else { SMALL };
        let mut loan = self
            .publisher
            .loan(&Layout::contiguous(DType::U64, &[words])?)?;
        let payload = Payload::of(words, seed);
        self.site
            .apart(|| Ok(payload.fill(&mut loan, &self.sending)?))?;
        self.due.insert(seed, false);
        loan.send(&self.sending).map_err(Error::from)?;
        self.due.insert(seed, true);
        Ok(())
    }

    /// Whether what was due has come by this sample.
    fn take(&mut self, sample: Sample) -> Result<()> {
        let Some(mark) = PayloadMark::of(sample.metadata()) else {
            bail!("a sample without a mark")
        };
        let Some(was_sent) = self.due.remove(&mark.seed) else {
            ensure!(
                self.history.take() == Some(mark.seed),
                "sample {} was not due: doubled",
                mark.seed
            );
            return self.finish(sample);
        };
        self.last = mark.seed;
        match self.finish(sample) {
            Err(error) if is_lost(&error) => {
                ensure!(!was_sent, "sample {} was sent, and is lost", mark.seed);
                Ok(())
            }
            other => other,
        }
    }

    fn finish(&mut self, sample: Sample) -> Result<()> {
        let (stream, sequence) = (sample.stream().clone(), sample.sequence());
        let check = self
            .site
            .apart(|| self.error_counters.check_sample(&sample))?;
        let finished = sample.finish(self.site.patience);
        self.site
            .apart(|| Ok(stream.synchronize(self.site.patience)?))?;
        finished?;
        let wrong = check.map(|check| self.error_counters.wrong_words(check));
        ensure!(
            wrong == Some(0),
            "sample {sequence} is torn: {wrong:?} wrong words"
        );
        Ok(())
    }

    /// A newcomer gets the last sample.
    fn join_late(&mut self, seed: u64) -> Result<()> {
        let mut late = self
            .site
            .context
            .subscriber(&self.site.name_of("channel"))?;
        let sample = late.receive(&self.receiving, self.site.patience)?;
        let found = PayloadMark::of(sample.metadata()).map(|mark| mark.seed);
        ensure!(
            found == Some(seed),
            "the history has {found:?} where {seed} was sent last"
        );
        self.finish(sample)
    }
}

fn is_lost(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Error::Lost(Loss::Sample { .. })))
}

impl Workload for Channel {
    fn turn(&mut self, seed: u64) -> Result<()> {
        self.join_again()?;
        self.send(seed)?;
        while self.due.values().any(|&was_sent| was_sent) {
            let sample = self.receive()?;
            self.take(sample)?;
        }
        self.join_late(seed)
    }
}
