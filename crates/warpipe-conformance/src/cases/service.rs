//! Services for clients while servers come, go and die.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use warpipe::{Client, ClientOptions, Error, JobEnd, Pending, Stream};
use warpipe_testkit::eventually;

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::{fill_input, input_layout, result_of};
use crate::peer::{Answer, Batch, Order, Peer, Reply, Task};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "several servers share the requests of several clients, in any order of attaching",
        many_to_many,
    ),
    Case::new(
        "a request is answered by another server after its server is killed",
        fail_over,
    )
    .ends_clients(),
    Case::new(
        "a client without servers is answered when one attaches",
        late_server,
    ),
    Case::new(
        "a request without a server ends at its deadline, and no server begins it later",
        deadline,
    ),
    Case::new(
        "a server's rejection reaches the client at once, and its failure costs an attempt",
        refusal,
    ),
    Case::new(
        "a server continues when a client is killed in a request",
        killed_client,
    )
    .ends_clients(),
];

const WORDS: u64 = 256;

fn ask(client: &Client, stream: &Stream, seed: u64, deadline: Duration) -> Result<Pending> {
    let input = fill_input(
        client.loan(&input_layout(WORDS)?)?,
        seed,
        Duration::ZERO,
        stream,
    )?;
    Ok(client
        .request(input, stream, deadline)
        .map_err(Error::from)?)
}

fn server(context: &Context, service: &str) -> Result<Peer> {
    let mut peer = context.peer()?;
    peer.task(Task::Serve(service.into()))?;
    Ok(peer)
}

fn count(peer: &mut Peer) -> Result<u64> {
    match peer.answer()?? {
        Answer::Number(number) => Ok(number),
        other => bail!("{other:?} instead of a number"),
    }
}

fn many_to_many(context: &Context) -> Result<()> {
    const CALLS: u64 = 30;
    let guard = context.guard();
    let (mut servers, mut clients) = (Vec::new(), Vec::new());
    // One server before the clients, one after.
    for (index, list) in [0, 1, 1, 0].into_iter().enumerate() {
        let mut peer = context.peer()?;
        if list == 0 {
            peer.task(Task::Serve("sum".into()))?;
            peer.send(&Order::Task(Task::ServeOn {
                slow_us: 200,
                idle_ms: 1500,
            }))?;
            servers.push(peer);
        } else {
            let batch = Batch::of(CALLS, WORDS, 1000 * index as u64);
            peer.send(&Order::Task(Task::Call {
                service: "sum".into(),
                batch,
            }))?;
            clients.push(peer);
        }
    }
    for client in &mut clients {
        let right = count(client)?;
        ensure!(right == CALLS, "{right} right replies of {CALLS}");
    }
    let done = servers.iter_mut().map(count).collect::<Result<Vec<_>>>()?;
    ensure!(
        done.iter().sum::<u64>() == 2 * CALLS,
        "the servers answered {done:?}"
    );
    clients
        .into_iter()
        .chain(servers)
        .try_for_each(Peer::dismiss)?;
    guard.settles()
}

fn fail_over(context: &Context) -> Result<()> {
    context.warm_up()?;
    let guard = context.guard();
    let stream = context.stream()?;
    let options = ClientOptions {
        prefetch: 1,
        ..context.domain.on(&context.device)
    };
    let client = Client::new("sum", options)?;
    let (mut victim, mut heir) = (server(context, "sum")?, server(context, "sum")?);
    let pending = ask(&client, &stream, 4, PATIENCE)?;
    // The server that gets it attaches by accepting; the other one waits for its turn.
    victim.lease(Task::Accept)?;
    victim.kill()?;
    ensure!(
        heir.lease(Task::Accept)?.1 == 2,
        "the other server gets it, as the second attempt"
    );
    heir.task(Task::Answer(Reply::Complete { slow_us: 0 }))?;
    let reply = pending.wait(&stream, PATIENCE)?;
    ensure!(
        reply.to_vec(PATIENCE)? == result_of(WORDS, 4) && reply.attempt == 2,
        "the reply is right"
    );
    ensure!(
        reply.worker_pid == heir.id() as i32,
        "the other one replied"
    );
    drop((reply, client, victim));
    heir.dismiss()?;
    stream.synchronize(PATIENCE)?;
    drop(stream);
    guard.settles()
}

fn late_server(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let client = context.client("sum")?;
    let pending = ask(&client, &stream, 7, PATIENCE)?;
    let mut late = server(context, "sum")?;
    late.lease(Task::Accept)?;
    late.task(Task::Answer(Reply::Complete { slow_us: 0 }))?;
    ensure!(
        pending.wait(&stream, PATIENCE)?.to_vec(PATIENCE)? == result_of(WORDS, 7),
        "the reply is right"
    );
    late.dismiss()
}

fn deadline(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let client = Client::new(
        "sum",
        ClientOptions {
            prefetch: 4,
            ..context.domain.on(&context.device)
        },
    )?;
    let pending = ask(&client, &stream, 1, Duration::from_millis(30))?;
    let late = pending.wait(&stream, PATIENCE);
    ensure!(
        matches!(
            late,
            Err(Error::Job {
                end: JobEnd::Expired,
                ..
            })
        ),
        "no server gave {late:?}"
    );
    let mut server = server(context, "sum")?;
    let first = ask(&client, &stream, 2, PATIENCE)?;
    ensure!(
        server.lease(Task::Accept)?.0 == 2,
        "what had passed is not given out"
    );
    // Stopped, the server finds the next ones in its ring when its deadline has passed.
    server.stop()?;
    let second = ask(&client, &stream, 3, Duration::from_millis(300))?;
    let third = ask(&client, &stream, 4, PATIENCE)?;
    // The first request counts until its answer, that it came too late, has been seen.
    let are_given = || client.state().is_ok_and(|state| state.leased == 3);
    ensure!(
        eventually(PATIENCE, are_given),
        "not all are in the server's ring: {:?}",
        client.state()
    );
    let late = second.wait(&stream, PATIENCE);
    ensure!(
        matches!(
            late,
            Err(Error::Job {
                end: JobEnd::Expired,
                ..
            })
        ),
        "a stopped server gave {late:?}"
    );
    server.go_on()?;
    ensure!(
        server.lease(Task::Accept)?.0 == 4,
        "a request is not begun after its deadline"
    );
    for _ in 0..2 {
        server.task(Task::Answer(Reply::Complete { slow_us: 0 }))?;
    }
    ensure!(
        first.wait(&stream, PATIENCE)?.to_vec(PATIENCE)? == result_of(WORDS, 2),
        "the first reply is right"
    );
    ensure!(
        third.wait(&stream, PATIENCE)?.to_vec(PATIENCE)? == result_of(WORDS, 4),
        "the third reply is right"
    );
    ensure!(
        eventually(PATIENCE, || client
            .state()
            .is_ok_and(|state| state.leased == 0)),
        "nothing is held"
    );
    server.dismiss()
}

fn refusal(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let options = ClientOptions {
        max_attempts: 2,
        ..context.domain.on(&context.device)
    };
    let client = Client::new("sum", options)?;
    let mut server = server(context, "sum")?;
    let pending = ask(&client, &stream, 1, PATIENCE)?;
    server.lease(Task::Accept)?;
    server.task(Task::Answer(Reply::Reject("not today".into())))?;
    match pending.wait(&stream, PATIENCE) {
        Err(Error::Job {
            name,
            end: JobEnd::Rejected { reason },
            ..
        }) => {
            ensure!(name == "sum" && reason == "not today", "{name}: {reason}")
        }
        other => bail!("a refusal gave {other:?}"),
    }
    let pending = ask(&client, &stream, 2, PATIENCE)?;
    for attempt in 1..=2 {
        ensure!(
            server.lease(Task::Accept)?.1 == attempt,
            "attempt {attempt}"
        );
        server.task(Task::Answer(Reply::Fail(format!("trouble {attempt}"))))?;
    }
    match pending.wait(&stream, PATIENCE) {
        Err(Error::Job {
            end: JobEnd::DeadLettered { reasons },
            ..
        }) => {
            ensure!(reasons == ["trouble 1", "trouble 2"], "{reasons:?}")
        }
        other => bail!("two failures gave {other:?}"),
    }
    server.dismiss()
}

fn killed_client(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let mut server = server(context, "sum")?;
    let mut victim = context.peer()?;
    victim.send(&Order::Task(Task::Call {
        service: "sum".into(),
        batch: Batch::of(1, WORDS, 1),
    }))?;
    server.lease(Task::Accept)?;
    victim.kill()?;
    let client = context.client("sum")?;
    let pending = ask(&client, &stream, 5, PATIENCE)?;
    server.lease(Task::Accept)?;
    let answer = server.try_ask(&Order::Task(Task::Answer(Reply::Complete { slow_us: 0 })))?;
    if let Err(fault) = answer {
        ensure!(
            fault.kind == "PeerGone",
            "an answer to the dead gave {fault}"
        );
    }
    server.task(Task::Answer(Reply::Complete { slow_us: 0 }))?;
    ensure!(
        pending.wait(&stream, PATIENCE)?.to_vec(PATIENCE)? == result_of(WORDS, 5),
        "the reply is right"
    );
    drop(client);
    // The dead one's name was for once, and the server clears it away when it looks again.
    let mut is_clear = || {
        let served = server.task(Task::ServeOn {
            slow_us: 0,
            idle_ms: 50,
        });
        served.is_ok()
            && context
                .domain
                .endpoints()
                .is_ok_and(|all| all.iter().all(|found| found.holder.is_some()))
    };
    ensure!(
        eventually(PATIENCE, &mut is_clear),
        "nothing of the dead is left: {:?}",
        context.domain.endpoints()
    );
    server.dismiss()
}
