//! The consumer starts first: it can give up with a clear message, or wait.
//!
//! A subscriber is made from a name. While no publisher has that name, `Subscriber::open` fails when
//! its wait is over. A publisher that starts within that time is attached to at once; nothing polls
//! for it.
//!
//! ```text
//! cargo run -p warpipe --example consumer_first                     # both processes
//! cargo run -p warpipe --example consumer_first -- --role consumer  # or: one terminal each, the consumer first
//! cargo run -p warpipe --example consumer_first -- --role producer
//! ```
//!
//! It ends with `ok: gave up twice, then waited, and received: hello from a latecomer`.

mod stage;

use std::process::ExitCode;
use std::time::Duration;

use stage::{Actor, Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{Error, Publisher, Subscriber, SubscriberOptions};

const NAME: &str = "early/bird";
const GREETING: &[u8] = b"hello from a latecomer";

fn main() -> ExitCode {
    play(&[], |stage| match stage.role() {
        "producer" => produce(stage),
        "consumer" => consume(stage, || Ok(None)),
        // The producer is started when the consumer has already seen that no publisher exists.
        _ => consume(stage, || stage.start("producer").map(Some)),
    })
}

fn options(stage: &Stage) -> SubscriberOptions {
    stage.domain.on(&stage.device)
}

fn consume(
    stage: &Stage,
    start_producer: impl FnOnce() -> Outcome<Option<Actor>>,
) -> Outcome<String> {
    give_up(
        "at once",
        Subscriber::open(NAME, options(stage), Duration::ZERO),
    )?;
    let soon = Duration::from_millis(200);
    give_up("after 200 ms", Subscriber::open(NAME, options(stage), soon))?;

    println!("waiting for somebody to publish {NAME:?}");
    let producer = start_producer()?;
    let mut subscriber = Subscriber::open(NAME, options(stage), PATIENCE)?;
    let greeting = subscriber
        .receive(&stage.device.stream()?, PATIENCE)?
        .to_vec(PATIENCE)?;
    ensure(greeting == GREETING, || {
        format!("received {:?}", String::from_utf8_lossy(&greeting))
    })?;
    producer.map_or(Ok(()), Actor::finish)?;
    Ok(format!(
        "gave up twice, then waited, and received: {}",
        String::from_utf8_lossy(&greeting)
    ))
}

/// There is no publisher: the error has a variant of its own, and its text gives the next step.
fn give_up(when: &str, built: warpipe::Result<Subscriber>) -> Outcome {
    match built {
        Err(error @ Error::NotFound { .. }) => println!("gave up {when}: {error}"),
        Err(error) => return Err(error.into()),
        Ok(_) => return Err("there is a publisher already; start the consumer first".into()),
    }
    Ok(())
}

fn produce(stage: &Stage) -> Outcome<String> {
    let publisher = Publisher::new(NAME, stage.domain.on(&stage.device))?;
    publisher.wait_for_subscribers(1, PATIENCE)?;
    let stream = stage.device.stream()?;
    publisher.send_bytes(&stream, GREETING)?;
    stream.synchronize(PATIENCE)?;
    Ok(format!("sent {} bytes", GREETING.len()))
}
