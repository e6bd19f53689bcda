//! The `warpipe` command.
mod choice;
mod exit;
mod image;
mod interrupt;
mod npy;
mod output;
mod process;
mod registered;
mod save;
mod source;
mod statistics;
fn main() {}
