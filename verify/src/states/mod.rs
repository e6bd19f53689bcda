//! Models for [`steps`](crate::verify::steps), and others with larger steps, each over the library's
//! own code.

// Where they see what they check.
pub use crate::pool::states as pool;
pub use crate::queue::states as queue;
pub use crate::sync::semaphore::states as semaphore;
