//! Results of several values, as named tuples of `python/warpipe/_tuples.py`.

use pyo3::call::PyCallArgs;
use pyo3::prelude::*;

fn named<'py>(
    py: Python<'py>,
    class: &str,
    values: impl PyCallArgs<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    py.import("warpipe._tuples")?.getattr(class)?.call1(values)
}

/// Bytes allocated so far, and their limit.
pub fn memory_use(py: Python<'_>, (allocated, limit): (u64, u64)) -> PyResult<Bound<'_, PyAny>> {
    named(py, "MemoryUse", (allocated, limit))
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
    let values = (endpoint.name.to_string(), endpoint.holder.is_some(), pid);
    named(py, "EndpointInfo", values)
}
