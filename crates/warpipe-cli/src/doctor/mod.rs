//! `warpipe doctor`: what works here, found by doing it.

mod backlog;
mod channel;
mod child;
mod gpu;
mod memory;
mod report;
pub(crate) mod system;

use warpipe::{Device, Domain};

use crate::args::DoctorArgs;
use crate::exit::Exit;
use crate::output::Output;

pub use child::{ChildArgs, run as run_child};
use report::Report;

/// Runs every check, printing each as it is done.
pub fn run(args: &DoctorArgs) -> anyhow::Result<Exit> {
    let mut report = Report::new(Output::new(args.json));
    report.section("system")?;
    report.add(system::descriptors())?;
    report.add(system::death())?;
    report.add(system::profiler())?;
    let domain = Domain::from_environment();
    report.add(system::domain(&domain))?;
    let domain = domain.ok();
    report.add(backlog::check(domain.as_ref()))?;
    report.section("host backend")?;
    examine(&mut report, "host", &Device::host(), domain.as_ref())?;
    let gpus = gpu::find(&mut report)?;
    for (name, gpu) in &gpus {
        report.section(&format!("{name}: {}", gpu.info().name))?;
        examine(&mut report, name, gpu, domain.as_ref())?;
        report.add(system::cpus(&gpu.info().id).of(name))?;
    }
    if !gpus.is_empty() {
        report.section("between GPUs")?;
        gpu::peers(&mut report, &gpus)?;
        report.add(system::mps())?;
        report.add(system::queues())?;
    }
    report.section("this process")?;
    report.add(memory::given_back())?;
    report.add(system::lifeline())?;
    report.finish()
}

/// Everything that one device must be able to do.
fn examine(
    report: &mut Report,
    name: &str,
    device: &Device,
    domain: Option<&Domain>,
) -> anyhow::Result<()> {
    let checks = [
        memory::shared(device).of(name),
        memory::read_only(device).of(name),
        memory::stream_order(device).of(name),
        channel::channel(device, domain).of(name),
    ];
    checks.into_iter().try_for_each(|check| report.add(check))?;
    report.judge(name);
    Ok(())
}
