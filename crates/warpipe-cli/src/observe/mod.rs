//! A look at the endpoints of a domain and at the memory of all processes, by the statistics pages:
//! `top`, `metrics` and `ls -v` show it.

mod memory;
mod process;
mod rates;
mod snapshot;
pub mod text;

pub use memory::MemoryRow;
pub use process::ProcessRow;
#[cfg(test)]
pub use process::SlowPathRow;
pub use rates::{Meter, Rate};
pub use snapshot::{
    EndpointRow, Snapshot, Source, SubscriberRow, existing_domain, missing, style_of,
};
