//! Models for [`steps`](crate::steps), and others with larger steps, each over the library's
//! own code.

// Where they see what they check.
pub use crate::pool::states as pool;
pub use crate::queue::states as queue;
pub use crate::semaphore::states as semaphore;
