//! Several tensors in one sample, through the C interface.

use std::ffi::CStr;

use crate::common::{Fixture, LONG, bytes_layout, none, zeroed};
use warpipe_c::*;

fn part(name: &CStr, bytes: u64) -> warpipe_part {
    let mut part: warpipe_part = zeroed();
    for (to, &from) in part.name.iter_mut().zip(name.to_bytes()) {
        *to = from as _;
    }
    part.layout = bytes_layout(bytes);
    // Ignored in an argument, whatever a caller left there.
    part.is_in_place = 0x5A5A_5A5A;
    part
}

#[test]
fn the_parts_of_a_loan_arrive_by_name_and_wrong_ones_are_refused() {
    let fixture = Fixture::new();
    let (publisher, subscriber) = fixture.channel(c"frames");
    let named = [part(c"image", 6), part(c"depth", 4)];
    let loan: *mut warpipe_loan = get!(warpipe_publisher_loan_parts(publisher, named.as_ptr(), 2));
    let (mut places, mut count) = ([part(c"", 0); 3], 0);
    ok!(warpipe_loan_list_parts(
        loan,
        places.as_mut_ptr(),
        3,
        &mut count
    ));
    assert_eq!((count, places[1].slot), (2, places[0].slot + 256));
    assert!(places[..2].iter().all(|it| it.is_in_place == 0));
    for (name, byte, bytes) in [(c"image", 1, 6), (c"depth", 2, 4)] {
        let data: [u8; 8] = [byte; 8];
        let (name, data) = (name.as_ptr(), data.as_ptr().cast());
        ok!(warpipe_loan_write(loan, fixture.stream, name, data, bytes));
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_loan_write(loan, fixture.stream, name, data, bytes + 1)
        );
    }
    ok!(warpipe_loan_send(
        loan,
        fixture.stream,
        WARPIPE_USUAL_TIMEOUT,
        none()
    ));
    let sample: *mut warpipe_sample =
        get!(warpipe_subscriber_receive(subscriber, fixture.stream, LONG));
    ok!(warpipe_sample_list_parts(
        sample,
        places.as_mut_ptr(),
        1,
        &mut count
    ));
    assert_eq!((count, places[0].name), (2, named[0].name));
    let mut bytes = [0u8; 260];
    ok!(warpipe_sample_copy_to(
        sample,
        none(),
        bytes.as_mut_ptr().cast(),
        260,
        LONG
    ));
    assert_eq!((bytes[5], bytes[256]), (1, 2));
    ok!(warpipe_sample_finish(sample, LONG));
    let mut endless = part(c"a", 1);
    endless.name.fill(b'a' as _);
    for wrong in [
        [endless, named[0]],
        [named[0], named[0]],
        [part(c"", 1), named[0]],
    ] {
        let mut loan = none();
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_publisher_loan_parts(publisher, wrong.as_ptr(), 2, &mut loan)
        );
    }
    ok!(warpipe_close(subscriber));
    ok!(warpipe_close(publisher));
}
