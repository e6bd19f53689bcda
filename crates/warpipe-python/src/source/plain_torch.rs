//! PyTorch's plain tensors, read by their attributes: a dictionary has hundreds of thousands of them,
//! and each capsule takes some microseconds of PyTorch's own.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};

use super::description::ArrayDescription;
use super::{Source, SourceOwner, Wanted};
use crate::device::is_cuda;
use crate::dtype;
use crate::stream::{Consumer, imported, torch_stream};

/// What tells that a tensor is plain: of PyTorch's own class, with its values in its memory.
pub struct PlainTorch<'py> {
    tensor: Bound<'py, PyType>,
    parameter: Bound<'py, PyType>,
    strided: Bound<'py, PyAny>,
    /// PyTorch's current stream on the GPU, if the device is one.
    current: Option<Consumer>,
    ordinal: u32,
}

impl<'py> PlainTorch<'py> {
    /// Of the imported PyTorch, if any.
    pub fn of(py: Python<'py>, device: &warpipe::Device) -> PyResult<Option<PlainTorch<'py>>> {
        let Some(torch) = imported(py, "torch")? else {
            return Ok(None);
        };
        let class = |owner: &Bound<'py, PyAny>, name| -> Option<Bound<'py, PyType>> {
            owner.getattr(name).ok()?.cast_into().ok()
        };
        let tensor = class(&torch, "Tensor");
        let parameter = torch.getattr("nn").ok();
        let parameter = parameter.and_then(|nn| class(&nn, "Parameter"));
        // Not while another thread is in the middle of importing it.
        let (Some(tensor), Some(parameter), Ok(strided)) =
            (tensor, parameter, torch.getattr("strided"))
        else {
            return Ok(None);
        };
        let current = torch_stream(py, device)?;
        let current = current.map(|raw| Consumer::foreign(py, device, raw));
        Ok(Some(PlainTorch {
            tensor,
            parameter,
            strided,
            current: current.transpose()?,
            ordinal: device.info().ordinal,
        }))
    }

    fn is_plain(&self, found: &Bound<'py, PyAny>) -> PyResult<bool> {
        let py = found.py();
        let class = found.get_type();
        if !class.is(&self.tensor) && !class.is(&self.parameter) {
            return Ok(false);
        }
        let says = |name| found.call_method0(name)?.is_truthy();
        Ok(found.getattr(intern!(py, "layout"))?.is(&self.strided)
            && !found.getattr(intern!(py, "is_nested"))?.is_truthy()?
            && !says(intern!(py, "is_conj"))?
            && !says(intern!(py, "is_neg"))?)
    }
}

impl Wanted<'_> {
    /// Finds a plain tensor of PyTorch on the host or on the device; `None` for any other object.
    pub fn of_plain_torch<'py>(
        self,
        torch: &PlainTorch<'py>,
        found: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Source>> {
        if !torch.is_plain(found).unwrap_or(false) {
            return Ok(None);
        }
        let py = found.py();
        let is = |name| found.getattr(name)?.is_truthy();
        let reader = if is(intern!(py, "is_cpu"))? {
            None
        } else if is(intern!(py, "is_cuda"))? && is_cuda(self.device) {
            let ordinal = found.call_method0(intern!(py, "get_device"))?;
            if ordinal.extract::<u32>()? != torch.ordinal {
                return Ok(None);
            }
            match &torch.current {
                Some(current) => Some(current.clone()),
                None => return Ok(None),
            }
        } else {
            return Ok(None);
        };
        // An element type, or an address, that it does not tell is told of elsewhere.
        let Ok(dtype) = dtype::from_argument(&found.getattr(intern!(py, "dtype"))?) else {
            return Ok(None);
        };
        let address = found.call_method0(intern!(py, "data_ptr"));
        let Ok(address) = address.and_then(|address| address.extract::<u64>()) else {
            return Ok(None);
        };
        let shape = numbers(&found.getattr(intern!(py, "shape"))?)?;
        let strides = numbers(&found.call_method0(intern!(py, "stride"))?)?;
        let described = ArrayDescription::new(dtype, shape, strides, address);
        let owner = match &reader {
            // PyTorch orders the reuse of the memory after its current stream.
            Some(_) if !self.lasting => SourceOwner::Nothing,
            // The tensor may be given other memory; its storage is what it has now.
            _ if self.lasting => {
                let storage = found.call_method0(intern!(py, "untyped_storage"))?;
                SourceOwner::Object(storage.unbind())
            }
            _ => SourceOwner::Object(found.clone().unbind()),
        };
        self.of_memory(&described, reader, owner).map(Some)
    }
}

fn numbers<T: for<'a> FromPyObject<'a, 'a, Error = PyErr>>(
    found: &Bound<'_, PyAny>,
) -> PyResult<Vec<T>> {
    let found = found.cast::<PyTuple>()?;
    found.iter().map(|number| number.extract::<T>()).collect()
}
