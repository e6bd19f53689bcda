//! Results of several values, as named tuples of `python/warpipe/_tuples.py`.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::publisher::word_of;

fn named<'py>(
    py: Python<'py>,
    class: &str,
    values: impl IntoPyObject<'py, Target = PyTuple>,
) -> PyResult<Bound<'py, PyAny>> {
    let class = py.import("warpipe._tuples")?.getattr(class)?;
    // Not by the class, which would run Python: a signal's handler that raises there would lose what
    // a wait has taken.
    py.get_type::<PyTuple>()
        .call_method1("__new__", (class, values))
}

/// Bytes allocated so far, and their limit.
pub fn memory_use(py: Python<'_>, (allocated, limit): (u64, u64)) -> PyResult<Bound<'_, PyAny>> {
    named(py, "MemoryUse", (allocated, limit))
}

/// What an import of a memory descriptor needs.
pub fn memory_info(py: Python<'_>, info: warpipe::MemoryInfo) -> PyResult<Bound<'_, PyAny>> {
    let class = py.import("warpipe._tuples")?.getattr("MemoryInfo")?;
    class.call1((info.bytes, info.mapped_bytes, info.device.to_string()))
}

/// A user's part of a pool.
pub fn pool_usage(py: Python<'_>, usage: warpipe::PoolUsage) -> PyResult<Bound<'_, PyAny>> {
    let warpipe::Quota { bytes, blocks } = usage.quota;
    let limits = (
        (bytes != u64::MAX).then_some(bytes),
        (blocks != u32::MAX).then_some(blocks),
    );
    let quota = named(py, "Quota", limits)?;
    let values = (usage.bytes, usage.blocks, usage.region_bytes, quota);
    named(py, "PoolUsage", values)
}

/// An endpoint of a domain.
pub fn endpoint_info<'py>(
    py: Python<'py>,
    endpoint: &warpipe::Endpoint,
) -> PyResult<Bound<'py, PyAny>> {
    let pid = endpoint.holder.as_ref().and_then(|holder| holder.pid);
    let name = endpoint.name.to_string();
    let values = (name, endpoint.holder.is_some(), pid, endpoint.foreign);
    named(py, "EndpointInfo", values)
}

/// What the library tells of a state, on its way to the named tuple of its name.
#[derive(Debug, Clone, Copy)]
pub struct Info<T>(pub T);

/// Names the values of a piece of information, in the order of its named tuple's fields.
macro_rules! info {
    ($class:ident, |$py:ident, $info:ident| $values:expr) => {
        impl<'py> IntoPyObject<'py> for Info<warpipe::$class> {
            type Target = PyAny;
            type Output = Bound<'py, PyAny>;
            type Error = PyErr;

            fn into_pyobject(self, $py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                let $info = self.0;
                named($py, stringify!($class), $values)
            }
        }
    };
}

info!(SubscriberInfo, |py, info| (
    info.pid,
    info.uid,
    word_of(info.state),
    info.silent_for.as_secs_f64(),
    info.in_flight,
    info.dropped,
));
info!(PreviousPublisher, |py, info| (info.pid, info.graceful));
info!(Discontinuity, |py, info| (
    info.missing,
    info.previous.map(Info),
));
info!(QueueState, |py, info| (
    info.workers,
    info.waiting,
    info.leased,
    info.finished,
));
info!(MemberInfo, |py, info| (
    info.name,
    info.role,
    info.pid,
    info.uid,
    word_of(info.state),
    info.silent_for.as_secs_f64(),
    info.since_ns,
    PyBytes::new(py, &info.generation),
    info.endpoints
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>(),
));
info!(Change, |py, info| {
    let what = match info {
        warpipe::Change::Joined(_) => "joined",
        warpipe::Change::Stalled(_) => "stalled",
        warpipe::Change::Recovered(_) => "recovered",
        warpipe::Change::Left(_) => "left",
        warpipe::Change::Died(_) => "died",
        _ => "unknown",
    };
    (what, Info(info.member().clone()))
});
info!(PoolStats, |py, info| (
    info.regions,
    info.total_bytes,
    info.limit_bytes,
    info.in_use_bytes,
    info.lent_bytes,
    info.waiting_bytes,
    info.high_water_bytes,
    info.allocations,
    info.waits,
    info.peers,
));
