//! Weights once on the device, as slices of the crate cudarc in every reader.
//!
//! A trainer has its parameters in slices of cudarc (as candle's tensors on a GPU are), copies each
//! once into the memory of a version, publishes that, and ends. The readers map the version for
//! reading and use its tensors as slices of cudarc at the same address: nothing is copied for them.
//! They compute with the weights after the trainer has ended. Without a GPU the same steps go
//! through host memory.
//!
//! **This module is marked for unsafe**: it makes slices of memory that cudarc did not allocate.
//!
//! ```text
//! cargo run -p warpipe --example shared_weights
//! ```
//!
//! It ends with `ok: 2 readers had both tensors of version 1 without a copy, after their trainer`.

mod stage;

use std::mem::ManuallyDrop;
use std::process::ExitCode;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr as _, result};
use stage::{Outcome, PATIENCE, Stage, ensure, play};
use warpipe::weights::{Keeper, SharedTensor, SharedWeights, Weights};
use warpipe::{DType, Device, DeviceKind, Layout};

const NAME: &str = "network";
const READERS: usize = 2;
/// Name, rows and columns of each tensor.
const TENSORS: [(&str, u64, u64); 2] = [("embed.weight", 64, 32), ("head.weight", 10, 64)];

fn main() -> ExitCode {
    play(&[], |stage| match stage.role() {
        "trainer" => train(stage),
        "reader" => read(stage),
        _ => {
            // Descriptors alone: a process that does nothing else is the safest place for it.
            let keeper = Keeper::new(NAME, stage.domain.options())?;
            stage.start("trainer")?.finish()?;
            let readers: Outcome<Vec<_>> = (0..READERS).map(|_| stage.start("reader")).collect();
            readers?
                .into_iter()
                .try_for_each(|reader| reader.finish())?;
            drop(keeper);
            Ok(format!(
                "{READERS} readers had both tensors of version 1 without a copy, after their trainer"
            ))
        }
    })
}

/// Parameter `index` of a tensor.
fn parameter(tensor: usize, index: u64) -> f32 {
    (1 + tensor) as f32 + index as f32 / 1024.0
}

fn parameters(tensor: usize) -> Vec<f32> {
    let (_, rows, columns) = TENSORS[tensor];
    let indexes = 0..rows * columns;
    indexes.map(|index| parameter(tensor, index)).collect()
}

/// A stream of cudarc's on the example's GPU; `None` on the host.
fn cudarc_stream(stage: &Stage) -> Outcome<Option<Arc<CudaStream>>> {
    if stage.device.info().id.kind == DeviceKind::Host {
        return Ok(None);
    }
    let option = stage.option("--device").unwrap_or_default();
    let ordinal = option.strip_prefix("cuda:").unwrap_or("0").parse()?;
    // The device's primary context, in which warpipe works, too: an address of one is the other's.
    let context = CudaContext::new(ordinal)?;
    Ok(Some(context.new_stream()?))
}

fn train(stage: &Stage) -> Outcome<String> {
    let layouts: Result<Vec<_>, _> = TENSORS
        .iter()
        .map(|&(name, rows, columns)| {
            Layout::contiguous(DType::F32, &[rows, columns]).map(|layout| (name, layout))
        })
        .collect();
    let builder = Weights::builder(&stage.device, layouts?)?;
    let stream = cudarc_stream(stage)?;
    for (tensor, &offset) in builder.offsets().iter().enumerate() {
        match &stream {
            Some(stream) => {
                // As a training step leaves it: a slice that cudarc allocated.
                let trained: CudaSlice<f32> = stream.clone_htod(&parameters(tensor))?;
                let (from, _in_use) = trained.device_ptr(stream);
                let (to, bytes) = (
                    builder.memory().expect("there are tensors").ptr() + offset,
                    trained.num_bytes(),
                );
                // SAFETY: the slice and the tensor's place in the memory are `bytes` long; both live
                // until the stream is synchronised below.
                unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream())? };
                stream.synchronize()?;
            }
            None => fill_on_host(&stage.device, &builder, tensor, offset)?,
        }
    }
    // Hashes the memory, which nothing may write from now on.
    let weights = builder.finish()?;
    let version = weights.publish(&stage.domain, NAME, PATIENCE)?.version;
    Ok(format!("published version {version}"))
}

fn fill_on_host(
    device: &Device,
    builder: &warpipe::weights::WeightsBuilder,
    tensor: usize,
    offset: u64,
) -> Outcome {
    let bytes: Vec<u8> = parameters(tensor)
        .into_iter()
        .flat_map(f32::to_ne_bytes)
        .collect();
    builder
        .memory()
        .expect("there are tensors")
        .write(&device.stream()?, offset, &bytes)?;
    Ok(())
}

fn read(stage: &Stage) -> Outcome<String> {
    let weights = SharedWeights::open(NAME, stage.domain.on(&stage.device), PATIENCE)?;
    let stream = cudarc_stream(stage)?;
    for (tensor, (name, _, _)) in TENSORS.iter().enumerate() {
        let shared = weights
            .tensor(name)
            .ok_or_else(|| format!("version {} has no {name}", weights.info().version))?;
        let found = match &stream {
            Some(stream) => {
                let slice = slice_of(stream, &shared)?;
                // A kernel of cudarc's would take `&*slice` as an argument; here the host looks.
                stream.clone_dtoh(&*slice)?
            }
            None => floats(&shared.memory.to_vec(PATIENCE)?),
        };
        ensure(found == parameters(tensor), || {
            format!("{name} has wrong parameters")
        })?;
    }
    Ok(format!("has version {}", weights.info().version))
}

/// A shared tensor as a slice of cudarc. It is never dropped, as cudarc would free the memory, and
/// only read: a write would fault.
fn slice_of(
    stream: &Arc<CudaStream>,
    tensor: &SharedTensor,
) -> Outcome<ManuallyDrop<CudaSlice<f32>>> {
    ensure(tensor.info.layout.dtype() == DType::F32, || {
        format!("{:?} are no floats", tensor.info.layout)
    })?;
    let floats = usize::try_from(tensor.info.layout.bytes())? / size_of::<f32>();
    // SAFETY: the mapped tensor is as long, holds floats, and lives longer than the slice: the
    // caller has both.
    let slice = unsafe { stream.upgrade_device_ptr(tensor.memory.ptr(), floats) };
    Ok(ManuallyDrop::new(slice))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let floats = bytes.chunks_exact(size_of::<f32>());
    floats
        .map(|float| f32::from_ne_bytes(float.try_into().unwrap_or_default()))
        .collect()
}
