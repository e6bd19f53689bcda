//! Samples and loans of several tensors.

use std::ffi::{CStr, c_char, c_void};

use warpipe::{Layout, Part, Publisher, Sample};

use crate::arguments::{fixed, put_list, slice, text};
use crate::call::{call, make_beside, read};
use crate::{
    Failure, HostCall, LoanKind, Owner, Result, handle, layout_of, warpipe_host_function,
    warpipe_layout, warpipe_loan, warpipe_published, warpipe_publisher, warpipe_sample,
    warpipe_status,
};

/// The longest name of a part, in bytes.
pub const WARPIPE_PART_NAME_BYTES_MAX: usize = 128;
const _: () = assert!(WARPIPE_PART_NAME_BYTES_MAX == warpipe::PART_NAME_BYTES_MAX);

/// One tensor of a sample or a loan that has several.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_part {
    /// Its name, which no other part has, and a zero.
    pub name: [c_char; 129],
    /// Its layout.
    pub layout: warpipe_layout,
    /// The device address of the element with all indices 0. Ignored in an argument.
    pub data: u64,
    /// The device address of the first byte of `layout.bytes`. Ignored in an argument.
    pub slot: u64,
    /// 1 if it lies in its sender's own memory, else 0. Ignored in an argument.
    pub is_in_place: u32,
}

impl warpipe_part {
    fn of(part: &Part) -> warpipe_part {
        warpipe_part {
            name: fixed(&part.name),
            layout: warpipe_layout::of(&part.layout),
            data: part.ptr,
            slot: part.slot_ptr,
            is_in_place: part.is_in_place.into(),
        }
    }

    fn name(&self) -> Result<&str> {
        // SAFETY: the bytes of the array, whatever the sign of C's characters.
        let bytes = unsafe { slice("name", self.name.as_ptr().cast::<u8>(), self.name.len()) }?;
        let name = CStr::from_bytes_until_nul(bytes).ok();
        let wrong = || Failure::argument("name", "a name without an end, or not UTF-8", "a text");
        name.and_then(|name| name.to_str().ok()).ok_or_else(wrong)
    }
}

/// Lends memory for several tensors, which `warpipe_loan_send` sends as one sample: `parts` has the
/// names and layouts of `count` of them. Each begins at a multiple of 256 bytes; the loan's own
/// layout is that of all their bytes. `warpipe_loan_list_parts` says where they lie.
///
/// `WARPIPE_INVALID_INPUT` for names that are alike, empty or no UTF-8, and for more than 127
/// parts, or more names and layouts than a sample's metadata has room for; as
/// `warpipe_publisher_loan`.
///
/// # Safety
/// `parts` is the address of `count` structures. The rest as for `warpipe_publisher_loan`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_publisher_loan_parts(
    publisher: *const warpipe_publisher,
    parts: *const warpipe_part,
    count: usize,
    loan: *mut *mut warpipe_loan,
) -> warpipe_status {
    let take = |found: &mut <warpipe_publisher as handle::Handle>::Guard| {
        // SAFETY: the caller's promise.
        let parts = unsafe { slice("parts", parts, count) }?;
        let named = parts
            .iter()
            .map(|part| Ok((part.name()?, part.layout.check()?)));
        let named: Vec<(&str, Layout)> = named.collect::<Result<_>>()?;
        let publisher: &Publisher = &found.object;
        Ok(LoanKind::Sample(publisher.loan_parts(&named)?))
    };
    // SAFETY: the caller's promise.
    unsafe { make_beside(publisher, "loan", loan, take) }
}

/// Adds a part to a loan of `warpipe_publisher_loan_parts`: it is sent where it lies. With `memory`
/// it begins at byte `offset` of that; without, `offset` is the device address of its first byte,
/// as for `warpipe_publisher_loan_in`. `release(argument)` is called once, as for that, also if
/// this call fails.
///
/// Fails as that does, and with `WARPIPE_INVALID_INPUT` for another loan.
///
/// # Safety
/// `name` is a text. The rest as for that.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_loan_add_part(
    loan: *mut warpipe_loan,
    name: *const c_char,
    memory: *const warpipe_published,
    offset: u64,
    layout: *const warpipe_layout,
    release: warpipe_host_function,
    argument: *mut c_void,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    let owner = Owner(unsafe { HostCall::new(release, argument) });
    call(loan, |lent| {
        // SAFETY: the caller's promises.
        let (name, layout) = unsafe { (text("name", name)?, layout_of(layout)?) };
        let sample = lent.object.of_publisher()?;
        let Some(memory) = handle::find_optional(memory)? else {
            // SAFETY: the caller's promise.
            return Ok(unsafe { sample.add_part_at(name, offset, &layout, owner) }?);
        };
        Ok(sample.add_part_in(name, &memory, offset, &layout, owner)?)
    })
}

/// Lists the parts of a loan, at most `capacity` of them; none of a loan of one tensor. `*count`
/// becomes the number of all.
///
/// # Safety
/// `parts` is the address of `capacity` structures, `count` that of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_loan_list_parts(
    loan: *const warpipe_loan,
    parts: *mut warpipe_part,
    capacity: usize,
    count: *mut usize,
) -> warpipe_status {
    let all = ("parts", parts, capacity);
    // SAFETY: the caller's promises.
    call(loan, |lent| unsafe {
        put_list(all, count, lent.parts().iter().map(warpipe_part::of))
    })
}

/// Describes the part of a loan that has this name.
///
/// `WARPIPE_INVALID_INPUT` if there is none.
///
/// # Safety
/// `name` is a text, `part` the address of a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_loan_get_part(
    loan: *const warpipe_loan,
    name: *const c_char,
    part: *mut warpipe_part,
) -> warpipe_status {
    let find = |lent: &LoanKind| -> Result<warpipe_part> {
        // SAFETY: the caller's promise.
        Ok(warpipe_part::of(lent.part(unsafe { text("name", name) }?)?))
    };
    // SAFETY: the caller's promise.
    unsafe { read(loan, "part", part, |lent| find(lent)) }
}

/// Describes the part of a sample that has this name.
///
/// `WARPIPE_INVALID_INPUT` if there is none.
///
/// # Safety
/// `name` is a text, `part` the address of a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_sample_get_part(
    sample: *const warpipe_sample,
    name: *const c_char,
    part: *mut warpipe_part,
) -> warpipe_status {
    let find = |sample: &Sample| -> Result<warpipe_part> {
        // SAFETY: the caller's promise.
        let name = unsafe { text("name", name) }?;
        Ok(warpipe_part::of(sample.part(name)?))
    };
    // SAFETY: the caller's promise.
    unsafe { read(sample, "part", part, |found| find(&found.sample)) }
}

/// Lists the parts of a sample, at most `capacity` of them; none of a sample of one tensor.
/// `*count` becomes the number of all.
///
/// # Safety
/// `parts` is the address of `capacity` structures, `count` that of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_sample_list_parts(
    sample: *const warpipe_sample,
    parts: *mut warpipe_part,
    capacity: usize,
    count: *mut usize,
) -> warpipe_status {
    let all = ("parts", parts, capacity);
    call(sample, |found| {
        let found = found.sample.parts().iter().map(warpipe_part::of);
        // SAFETY: the caller's promises.
        unsafe { put_list(all, count, found) }
    })
}
