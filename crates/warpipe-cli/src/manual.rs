//! `warpipe completions` and `warpipe man`: both are made from the command line's definition.

use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::args::{Arguments, CompletionShell, CompletionsArgs, ManArgs};
use crate::exit::{Exit, UsageError};
use crate::output::write_out;

/// The command line as its users see it: without the subcommands of child processes.
fn public() -> clap::Command {
    let full = Arguments::command();
    let shown = full
        .get_subcommands()
        .filter(|command| !command.is_hide_set());
    let mut public = clap::Command::new("warpipe")
        .version(env!("CARGO_PKG_VERSION"))
        .propagate_version(true)
        .subcommand_required(true)
        .after_help(crate::exit::HELP);
    if let Some(about) = full.get_about() {
        public = public.about(about.clone());
    }
    if let Some(about) = full.get_long_about() {
        public = public.long_about(about.clone());
    }
    public.subcommands(shown.cloned())
}

/// Prints a completion script.
pub fn complete(args: &CompletionsArgs) -> anyhow::Result<Exit> {
    let shell = match args.shell {
        CompletionShell::Bash => Shell::Bash,
        CompletionShell::Zsh => Shell::Zsh,
        CompletionShell::Fish => Shell::Fish,
    };
    // Collected first: the generator panics where the reader has gone away.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut public(), "warpipe", &mut script);
    print(&script)
}

/// Prints one manual page, or writes all of them.
pub fn man(args: &ManArgs) -> anyhow::Result<Exit> {
    if let Some(folder) = &args.out {
        return write_all(folder);
    }
    // As the pages of `--out` are made: each subcommand has its full name then.
    let mut command = public().disable_help_subcommand(true);
    command.build();
    if let Some(name) = &args.subcommand {
        // A subcommand of a subcommand is called by both names, as its page is.
        for part in name.split('-') {
            command = command
                .find_subcommand(part)
                .ok_or_else(|| UsageError(no_subcommand(name)))?
                .clone();
        }
    }
    let mut page = Vec::new();
    Man::new(command).render(&mut page)?;
    print(&page)
}

fn no_subcommand(name: &str) -> String {
    let command = public();
    let names: Vec<&str> = command
        .get_subcommands()
        .map(clap::Command::get_name)
        .collect();
    format!(
        "there is no subcommand {name:?}; use one of {}",
        names.join(", ")
    )
}

fn write_all(folder: &Path) -> anyhow::Result<Exit> {
    let failed = || {
        format!(
            "cannot write manual pages into {}; give an existing directory with --out",
            folder.display()
        )
    };
    clap_mangen::generate_to(public(), folder).with_context(failed)?;
    Ok(Exit::Done)
}

fn print(text: &[u8]) -> anyhow::Result<Exit> {
    write_out(text)?;
    Ok(Exit::Done)
}
