//! The `warpipe` command.

use std::process::ExitCode;

use warpipe_cli::Program;

fn main() -> ExitCode {
    warpipe_cli::main(std::env::args_os(), Program::this_executable()).into()
}
