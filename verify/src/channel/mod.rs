//! Stands for the channel: the watch over a publisher's life is the library's.

pub(crate) mod inlet;
mod work;

pub(crate) use work::{Arrival, Awaited, Data, Line, Parcel, SendError, Subscriber};
