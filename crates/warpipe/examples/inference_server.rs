//! Two processes serve one network, with its weights in memory once.
//!
//! The owner of the model has its weights in memory of its own, and publishes them for reading.
//! Each server opens them by ticket: it maps the owner's memory and loads nothing. A client sends
//! rows of numbers, and a free server runs them through three layers (64, 128, 64 and 10 wide, the
//! first two with ReLU) and replies. Every number is compared with the CPU's result in double
//! precision; it may differ by 0.00001 at most.
//!
//! **This module is marked for unsafe**: it launches kernels on device memory.
//!
//! ```text
//! cargo run -p warpipe --example inference_server                   # all processes
//! cargo run -p warpipe --example inference_server -- --role client  # or: one terminal each, in any order; the client
//! cargo run -p warpipe --example inference_server -- --role server  # is the owner, too; as many servers as you like
//! ```
//!
//! It ends with `ok: 64 requests answered by N servers, all within 0.00001 of the reference`, N
//! being 2.

mod stage;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use stage::{Actor, Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{
    Client, DType, Error, JobResult, Layout, Lease, Memory, Server, SharedMemory, Stream, Ticket,
};
use warpipe_kernels::Layer;

const SERVICE: &str = "network";
const WEIGHTS: &str = "network-weights";
/// Floats in a row: the input, the values between layers, the output.
const WIDTHS: [u64; 4] = [64, 128, 64, 10];
const SERVERS: usize = 2;
const REQUESTS: u64 = 64;
/// Rows in a request, and the most that a server takes.
const ROWS: u64 = 16;
const TOLERANCE: f64 = 0.00001;

fn main() -> ExitCode {
    play(&[], |stage| match stage.role() {
        "server" => serve(stage),
        "client" => ask(stage, Vec::new()),
        _ => {
            let servers: Outcome<Vec<Actor>> =
                (0..SERVERS).map(|_| stage.start("server")).collect();
            ask(stage, servers?)
        }
    })
}

/// The layers, one after another as they lie in memory: where weights and bias begin (in floats),
/// and their widths.
fn layers() -> impl Iterator<Item = (u64, u64, u64, u64)> {
    let mut next = 0;
    WIDTHS.windows(2).map(move |widths| {
        let (weights, inputs, outputs) = (next, widths[0], widths[1]);
        let bias = weights + inputs * outputs;
        next = bias + outputs;
        (weights, bias, inputs, outputs)
    })
}

/// The model: floats between -1 and 1, the same in each run, smaller the more inputs they serve.
fn parameters() -> Vec<f32> {
    let floats = layers().flat_map(|(first, _, inputs, outputs)| {
        let scale = (2.0 / inputs as f32).sqrt();
        (first..first + (inputs + 1) * outputs).map(move |index| scale * number(1, index))
    });
    floats.collect()
}

/// A float between -1 and 1.
fn number(seed: u64, index: u64) -> f32 {
    (warpipe_kernels::pattern(seed, index) as i32 as f32) / 2f32.powi(31)
}

fn rows_of(request: u64) -> Vec<f32> {
    (0..ROWS * WIDTHS[0])
        .map(|index| number(100 + request, index))
        .collect()
}

fn bytes_of(floats: &[f32]) -> Vec<u8> {
    floats
        .iter()
        .flat_map(|float| float.to_ne_bytes())
        .collect()
}

/// A server's view of the model: the owner's memory, and memory of its own for the values between
/// layers.
struct Model {
    weights: SharedMemory,
    between: [Memory; 2],
}

impl Model {
    fn open(stage: &Stage) -> Outcome<Model> {
        // By name; a ticket that was sent as a text would do as well.
        let weights = Ticket::to(&stage.domain, WEIGHTS)?.open(&stage.device, PATIENCE)?;
        let floats = layers()
            .map(|(_, bias, _, outputs)| bias + outputs)
            .last()
            .unwrap_or(0);
        ensure(weights.bytes() == floats * 4, || {
            format!("the weights are {} bytes", weights.bytes())
        })?;
        let room = || Memory::allocate(&stage.device, ROWS * WIDTHS[1].max(WIDTHS[2]) * 4);
        Ok(Model {
            weights,
            between: [room()?, room()?],
        })
    }

    /// Runs the request's rows through all layers on `stream`, and replies behind that.
    fn answer(&self, request: Lease, stream: &Stream) -> Outcome {
        let layout = request.layout();
        let rows = layout.shape().first().copied().unwrap_or(0);
        let is_wanted = layout.dtype() == DType::F32
            && layout.is_contiguous()
            && layout.shape() == [rows, WIDTHS[0]];
        if !is_wanted || rows > ROWS {
            return Ok(request.reject(&format!(
                "up to {ROWS} rows of {} float32 are wanted",
                WIDTHS[0]
            ))?);
        }
        let output = request.output(&Layout::contiguous(DType::F32, &[rows, WIDTHS[3]])?)?;
        self.weights.used_on(stream);
        self.between
            .iter()
            .for_each(|memory| memory.used_on(stream));
        let places = [
            request.ptr(),
            self.between[0].ptr(),
            self.between[1].ptr(),
            output.ptr(),
        ];
        for (step, (weights, bias, inputs, outputs)) in layers().enumerate() {
            let [weights, bias] = [weights, bias].map(|float| self.weights.ptr() + float * 4);
            let layer = Layer {
                weights,
                bias,
                inputs,
                outputs,
                relu: step < 2,
            };
            // SAFETY: the weights' size was checked, and nothing writes them; the request's shape
            // was checked; the memory between layers is this server's own, wide enough for ROWS
            // rows, and used by this stream alone, in its order.
            unsafe {
                warpipe_kernels::dense(stream, places[step + 1], places[step], rows, &layer)?
            };
        }
        Ok(request.complete(output, stream)?)
    }
}

/// Answers requests as long as there are clients.
fn serve(stage: &Stage) -> Outcome<String> {
    let model = Model::open(stage)?;
    let mut server = Server::new(SERVICE, stage.domain.on(&stage.device))?;
    let stream = stage.device.stream()?;
    let (mut answered, mut had_clients) = (0, false);
    loop {
        match server.accept(&stream, Duration::from_millis(100)) {
            Ok(request) => {
                model.answer(request, &stream)?;
                answered += 1;
            }
            Err(Error::Timeout { .. }) if had_clients && server.clients() == 0 => break,
            Err(Error::Timeout { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        had_clients |= server.clients() > 0;
    }
    stream.synchronize(PATIENCE)?;
    Ok(format!(
        "process {} answered {answered} requests",
        std::process::id()
    ))
}

/// Owns the weights, sends requests to the servers, and compares.
fn ask(stage: &Stage, servers: Vec<Actor>) -> Outcome<String> {
    let stream = stage.device.stream()?;
    let parameters = parameters();
    let weights = Memory::allocate(&stage.device, parameters.len() as u64 * 4)?;
    weights.write(&stream, 0, &bytes_of(&parameters))?;
    // A ticket does not order work: published memory must be complete by now.
    stream.synchronize(PATIENCE)?;
    let published = weights.publish(WEIGHTS, stage.domain.options())?;

    let client = Client::new(SERVICE, stage.domain.on(&stage.device))?;
    client.wait_for_servers(servers.len().max(1), PATIENCE)?;
    let layout = Layout::contiguous(DType::F32, &[ROWS, WIDTHS[0]])?;
    let mut pending = Vec::new();
    for request in 0..REQUESTS {
        let mut input = client.loan(&layout)?;
        input.write(&stream, &bytes_of(&rows_of(request)))?;
        pending.push(client.request(input, &stream, PATIENCE)?);
    }
    let (mut processes, mut furthest) = (BTreeSet::new(), 0f64);
    for (request, reply) in pending.into_iter().enumerate() {
        let reply = reply.wait(&stream, PATIENCE)?;
        processes.insert(reply.worker_pid);
        let error = error_of(&reply, request as u64, &parameters)?;
        ensure(error <= TOLERANCE, || {
            format!("request {request} is {error} from the reference")
        })?;
        furthest = furthest.max(error);
    }
    println!(
        "the furthest of {} numbers is {furthest:.1e} from the reference",
        REQUESTS * ROWS * WIDTHS[3]
    );
    // The servers see that there is no client any more, and end.
    drop((client, published));
    let count = processes.len();
    ensure(servers.is_empty() || count == servers.len(), || {
        format!("only {count} servers answered")
    })?;
    servers.into_iter().try_for_each(Actor::finish)?;
    Ok(format!(
        "{REQUESTS} requests answered by {count} servers, all within {TOLERANCE} of the reference"
    ))
}

/// The largest difference between a number of the reply and the reference.
fn error_of(reply: &JobResult, request: u64, parameters: &[f32]) -> Outcome<f64> {
    let bytes = reply.to_vec(PATIENCE)?;
    let found = bytes
        .chunks_exact(4)
        .map(|float| f32::from_ne_bytes(float.try_into().expect("chunks of 4 bytes")));
    let right: Vec<f64> = rows_of(request)
        .chunks(WIDTHS[0] as usize)
        .flat_map(|row| through(parameters, row))
        .collect();
    let count = bytes.len() / 4;
    ensure(count == right.len(), || {
        format!("request {request} came back with {count} numbers")
    })?;
    // With weights that have no effect, any reply would pass.
    let largest = right
        .iter()
        .fold(0f64, |largest, number| largest.max(number.abs()));
    ensure(largest > 1000.0 * TOLERANCE, || {
        format!("the reference of request {request} is next to 0")
    })?;
    let errors = found
        .zip(&right)
        .map(|(found, right)| (f64::from(found) - right).abs());
    // A NaN is infinitely far.
    Ok(errors.fold(0f64, |furthest, error| {
        if error.is_nan() {
            f64::INFINITY
        } else {
            furthest.max(error)
        }
    }))
}

/// The reference: one row through all layers, on the CPU and in double precision.
fn through(parameters: &[f32], row: &[f32]) -> Vec<f64> {
    let mut values: Vec<f64> = row.iter().map(|&value| value.into()).collect();
    for (step, (weights, bias, inputs, outputs)) in layers().enumerate() {
        let at = |index: u64| f64::from(parameters[index as usize]);
        let output = |column| {
            let products =
                (0..inputs).map(|k| values[k as usize] * at(weights + k * outputs + column));
            at(bias + column) + products.sum::<f64>()
        };
        values = (0..outputs)
            .map(output)
            .map(|sum| if step < 2 { sum.max(0.0) } else { sum })
            .collect();
    }
    values
}
