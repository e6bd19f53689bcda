//! The benchmarks alone, until the command line has them as `warpipe bench`.

#[path = "../bench/mod.rs"]
mod bench;

use std::process::ExitCode;

use clap::Parser;

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Bench(bench::BenchArgs),
}

fn main() -> ExitCode {
    let Arguments { command: Command::Bench(args) } = Arguments::parse();
    bench::run(&args).unwrap_or_else(|error| {
        eprintln!("warpipe: {error:#}");
        ExitCode::FAILURE
    })
}
