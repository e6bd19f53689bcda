//! Weights that are published where they lie: read by others, and freed when no process has them.

use std::sync::mpsc::{Receiver, TryRecvError, channel};

use anyhow::{Result, ensure};
use warpipe::OpenOptions;
use warpipe::weights::{Keeper, SharedWeights};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::peer::{Order, WeightsOrder};
use crate::weights_in_place::{self, Segments, check};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "weights are read where another allocator has put them, which has them until no process does",
        read,
    ),
    Case::new(
        "weights in place outlive their publisher and their keeper, and are taken over",
        killed,
    )
    .ends_clients(),
    Case::new(
        "a version that shares tensors of a base outlives its publishers and its keeper",
        shared_base,
    )
    .ends_clients(),
    Case::new(
        "weights in more pieces than a message has descriptors are read and taken over whole",
        many,
    ),
    Case::new(
        "a tensor that no process can open is not published in place",
        refused,
    ),
];

const NAME: &str = "weights";

const FEW: Segments = Segments {
    count: 3,
    pieces: 3,
    words_max: u64::MAX,
};

fn keeper(context: &Context) -> Result<Keeper> {
    Ok(Keeper::new(NAME, context.domain.options())?)
}

fn open_options(context: &Context) -> OpenOptions {
    context.domain.on(&context.device)
}

fn is_freed(freed: &Receiver<()>) -> bool {
    use std::sync::mpsc::RecvTimeoutError::Disconnected;
    freed.recv_timeout(PATIENCE) == Err(Disconnected)
}

fn is_kept(freed: &Receiver<()>) -> bool {
    freed.try_recv() == Err(TryRecvError::Empty)
}

fn read(context: &Context) -> Result<()> {
    let (keeper, counters) = (keeper(context)?, &mut context.error_counters()?);
    let (tell, freed) = channel();
    let weights = weights_in_place::weights(context, FEW, 1, &tell)?;
    drop(tell);
    let published = weights.publish(&context.domain, NAME, PATIENCE)?;
    drop(weights);
    let shared = SharedWeights::open(NAME, open_options(context), PATIENCE)?;
    check(context, counters, &shared, 1)?;
    let mut peer = context.peer()?;
    let name = NAME.to_string();
    peer.ask(&Order::Weights(WeightsOrder::Open { name, seed: 1 }))?;
    ensure!(
        SharedWeights::verify(NAME, open_options(context), PATIENCE)? == published.version,
        "the hashes"
    );
    let tensor = shared.tensor("t2");
    drop((keeper, published, shared));
    ensure!(is_kept(&freed), "a tensor is in use, and a peer has all");
    drop(tensor);
    ensure!(is_kept(&freed), "a peer has the weights");
    peer.kill()?;
    ensure!(is_freed(&freed), "nobody has the weights");
    Ok(())
}

fn killed(context: &Context) -> Result<()> {
    let (mut keeper, mut publisher) = (context.peer()?, context.peer()?);
    let name = || NAME.to_string();
    keeper.ask(&Order::Weights(WeightsOrder::Keep { name: name() }))?;
    let version = publisher.number(&Order::Weights(WeightsOrder::PublishInPlace {
        name: name(),
        segments: FEW,
        seed: 5,
    }))?;
    let counters = &mut context.error_counters()?;
    let shared = SharedWeights::open(NAME, open_options(context), PATIENCE)?;
    publisher.kill()?;
    keeper.kill()?;
    check(context, counters, &shared, 5)?;
    let next = self::keeper(context)?;
    let found = next.state()?;
    ensure!(found.candidate == Some(version), "{found:?}");
    ensure!(
        SharedWeights::verify(NAME, open_options(context), PATIENCE)? == version,
        "the hashes"
    );
    drop(shared);
    check(
        context,
        counters,
        &SharedWeights::open(NAME, open_options(context), PATIENCE)?,
        5,
    )
}

fn shared_base(context: &Context) -> Result<()> {
    let (mut keeper, mut publisher) = (context.peer()?, context.peer()?);
    let name = || NAME.to_string();
    keeper.ask(&Order::Weights(WeightsOrder::Keep { name: name() }))?;
    publisher.number(&Order::Weights(WeightsOrder::PublishInPlace {
        name: name(),
        segments: FEW,
        seed: 5,
    }))?;
    let counters = &mut context.error_counters()?;
    let base = SharedWeights::open(NAME, open_options(context), PATIENCE)?;
    publisher.kill()?;
    let weights = weights_in_place::beside_base(context, &base, 5)?;
    let published = weights.publish(&context.domain, NAME, PATIENCE)?;
    drop((weights, base));
    ensure!(
        published.wait_for_hashes(PATIENCE)?,
        "hashes that come later"
    );
    let shared = SharedWeights::open(NAME, open_options(context), PATIENCE)?;
    ensure!(
        shared.tensors().len() == 4 && shared.info().is_hashed,
        "{shared:?}"
    );
    check(context, counters, &shared, 5)?;
    keeper.kill()?;
    let version = published.version;
    drop(published);
    let next = self::keeper(context)?;
    let found = next.state()?;
    ensure!(found.candidate == Some(version), "{found:?}");
    ensure!(
        SharedWeights::verify(NAME, open_options(context), PATIENCE)? == version,
        "the hashes"
    );
    drop(shared);
    check(
        context,
        counters,
        &SharedWeights::open(NAME, open_options(context), PATIENCE)?,
        5,
    )
}

fn many(context: &Context) -> Result<()> {
    const COUNT: u64 = 300;
    let (tell, freed) = channel();
    let segments = Segments {
        count: COUNT,
        pieces: 1,
        words_max: 64,
    };
    let first = keeper(context)?;
    let weights = weights_in_place::weights(context, segments, 9, &tell)?;
    drop(tell);
    let published = weights.publish(&context.domain, NAME, PATIENCE)?;
    drop((weights, first));
    let next = keeper(context)?;
    let found = next.state()?;
    ensure!(found.candidate == Some(1), "{found:?}");
    SharedWeights::verify(NAME, open_options(context), PATIENCE)?;
    drop(published);
    let shared = SharedWeights::open(NAME, open_options(context), PATIENCE)?;
    ensure!(shared.parts().count() as u64 <= COUNT, "{shared:?}");
    check(context, &mut context.error_counters()?, &shared, 9)?;
    drop(next);
    ensure!(is_kept(&freed), "a reader has the weights");
    drop(shared);
    ensure!(is_freed(&freed), "nobody has the weights");
    Ok(())
}

fn refused(context: &Context) -> Result<()> {
    let (tell, freed) = channel();
    weights_in_place::refused(context, &tell)?;
    drop(tell);
    ensure!(is_freed(&freed), "the list is gone");
    Ok(())
}
