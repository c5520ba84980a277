//! What `--help` shows of the flags of `serve`: those that most people need, a line for each, so
//! that it fits a screen. `--help-all` has every flag with its whole text.

use clap::{Arg, ArgAction, Command, CommandFactory};

use super::Cli;

/// The least similarity (Jaro and Winkler) of a mistyped word and a command: `serv` and `serve`
/// have 0.96, `bench` and `branch` 0.84.
const LEAST_SIMILARITY: f64 = 0.8;

/// The flags in `--help`.
const SHOWN: [&str; 15] = [
    "config",
    "model",
    "offline",
    "served-model-name",
    "threads",
    "kv-memory",
    "host",
    "port",
    "tenants",
    "insecure",
    "itl-target-ms",
    "max-running",
    "decoding",
    "help",
    "help-all",
];

/// Returns the command whose name is most like `word`, if it is like it enough.
pub fn similar_command(word: &str) -> Option<String> {
    let command = Cli::command();
    let names = command.get_subcommands().filter(|it| !it.is_hide_set());
    let rated = names.map(|it| (strsim::jaro_winkler(word, it.get_name()), it.get_name()));
    let (similarity, name) = rated.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (similarity >= LEAST_SIMILARITY).then(|| name.to_owned())
}

/// Returns a command with both kinds of help. Its arguments have their whole text.
pub(super) fn with_help(command: Command) -> Command {
    let all = Arg::new("help-all").long("help-all");
    command
        .mut_args(shortened)
        .disable_help_flag(true)
        .next_help_heading(None)
        .arg(
            help_flag()
                .action(ArgAction::HelpShort)
                .help("Print the flags that most people need"),
        )
        .arg(
            all.action(ArgAction::HelpLong)
                .help("Print all flags, with their whole texts"),
        )
}

/// Returns the flag `--help`. Each command needs it: without clap's own flag, which is replaced in
/// one command, clap adds none to the others either.
pub(super) fn help_flag() -> Arg {
    let help = Arg::new("help").short('h').long("help");
    help.action(ArgAction::Help).help("Print help")
}

/// Returns an argument whose first sentence is its short text. The whole text names the environment
/// variable too.
fn shortened(arg: Arg) -> Arg {
    let text = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let first = text.split(". ").next().unwrap_or_default().to_owned();
    let variable = arg.get_env().map(|name| name.to_string_lossy());
    let variable = variable.map(|name| format!("\n\n[env: {name}]"));
    let is_shown = arg.get_long().is_none_or(|long| SHOWN.contains(&long));
    arg.hide_short_help(!is_shown)
        .hide_env(true)
        .long_help(text + &variable.unwrap_or_default())
        .help(first)
}
