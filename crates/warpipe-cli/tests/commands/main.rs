//! The command `warpipe`, as a program.

mod demo;
mod files;
mod gc;
mod members;
mod observe;
mod outputs;
mod pages;
mod run_mps;
#[path = "../support/mod.rs"]
mod support;
mod usage;
mod weights;
mod weights_refused;
mod weights_users;
