//! Where the flags of `serve` come from: the command line, then the environment, then the file of
//! `--config`, then their defaults.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::builder::BoolishValueParser;
use clap::error::{ContextKind, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, Error, FromArgMatches};
use toml::{Table, Value};

use super::help::{help_flag, with_help};
use super::{Cli, ModelFlags};

/// The name of the command whose flags have other sources than the command line.
const SERVE: &str = "serve";
/// The names of the arguments that give the model.
const MODEL: [&str; 2] = ["positional", "path"];

impl Cli {
    /// Reads the command line, the environment and the file of `--config`. If one of them is
    /// wrong, prints why and exits.
    pub fn read() -> Cli {
        Cli::read_from(std::env::args_os().collect()).unwrap_or_else(|error| error.exit())
    }

    /// Reads a command line, the environment and the file of `--config`.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub fn read_from(arguments: Vec<OsString>) -> Result<Cli, Error> {
        let matches = command(&[]).try_get_matches_from(arguments.clone());
        let matches = matches.map_err(|mut error| {
            // The tip to write the flag after "--", which would make it the model.
            error.remove(ContextKind::Suggested);
            error
        })?;
        let matches = match serve_matches(&matches).get_one::<PathBuf>("config") {
            None => matches,
            Some(file) => {
                let in_file = |text: String| {
                    let text = format!("{}: {text}\n", file.display());
                    Error::raw(ErrorKind::InvalidValue, text)
                };
                let settings = settings(file).map_err(in_file)?;
                let matches = command(&settings).try_get_matches_from(arguments);
                // Without the file, there was no error.
                matches.map_err(|error| in_file(problem(&error)))?
            }
        };
        check_model(&matches)?;
        let mut cli = Cli::from_arg_matches(&matches)?;
        let serve = match &mut cli.command {
            Some(super::Command::Serve(serve)) => serve,
            _ => &mut cli.serve,
        };
        let positional = serve.model.positional.take();
        serve.model.path = positional.or(serve.model.path.take());
        if serve_matches(&matches).value_source("names") == Some(ValueSource::CommandLine) {
            take_model_from_names(&mut serve.model)?;
        }
        Ok(cli)
    }
}

/// Makes the last name of the command line the model, if there are several names, no model, and the
/// last name is a path. `--served-model-name` takes all values that follow it, so it has taken the
/// path of `--served-model-name mymodel /path/model` too.
///
/// # Errors
/// If the last name may be that of a model on the hub. Serving the demo under it would mislead.
fn take_model_from_names(model: &mut ModelFlags) -> Result<(), Error> {
    let has_more = model.names.len() > 1;
    let Some(last) = model
        .names
        .last()
        .filter(|_| model.path.is_none() && has_more)
    else {
        return Ok(());
    };
    if PathBuf::from(last).is_absolute() || Path::new(last).exists() {
        model.path = model.names.pop().map(PathBuf::from);
    } else if last.contains('/') {
        let text = format!(
            "--served-model-name takes all values that follow it, also '{last}'. Give the model \
             before this flag, or with --model\n"
        );
        return Err(Error::raw(ErrorKind::ArgumentConflict, text));
    }
    Ok(())
}

/// A setting of the file: a flag, by its name in the program, and its values.
struct Setting {
    flag: String,
    values: Vec<String>,
}

/// Returns the command line's grammar. Flags of `serve` have environment variables, and `settings`
/// are their defaults.
fn command(settings: &[Setting]) -> Command {
    let with_sources = |arg: Arg| {
        let Some(long) = arg.get_long().map(str::to_owned) else {
            return arg;
        };
        let variable = format!("STERNA_{}", long.to_uppercase().replace('-', "_"));
        let arg = arg.env(variable).hide_env_values(true);
        let arg = match arg.get_action() {
            ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
            ArgAction::Append => arg.value_delimiter(','),
            _ => arg,
        };
        let setting = settings.iter().find(|setting| setting.flag == long);
        match setting {
            Some(setting) => arg.default_values(setting.values.clone()),
            None => arg,
        }
    };
    let command = with_help(Cli::command().mut_args(with_sources));
    command.mut_subcommands(|command| match command.get_name() {
        SERVE => with_help(command.mut_args(with_sources)),
        _ => command.arg(help_flag()),
    })
}

/// Returns the flags of `serve`, with its name or without.
fn serve_matches(matches: &ArgMatches) -> &ArgMatches {
    matches.subcommand_matches(SERVE).unwrap_or(matches)
}

/// Reads the settings file.
///
/// # Errors
/// If it cannot be read, is not TOML, or has a key that is no flag of `serve`.
fn settings(file: &Path) -> Result<Vec<Setting>, String> {
    let text = fs::read_to_string(file).map_err(|error| error.to_string())?;
    let table: Table = toml::from_str(&text).map_err(|error| error.to_string())?;
    let command = Cli::command();
    let mut settings: Vec<Setting> = Vec::new();
    for (key, value) in &table {
        let name = key.replace('_', "-");
        let is_named = |arg: &&Arg| {
            let aliases = arg.get_all_aliases().unwrap_or_default();
            arg.get_long() == Some(&name) || aliases.contains(&name.as_str())
        };
        let mut flags = command.get_arguments();
        let flag = flags.find(|arg| is_named(arg) && arg.get_id() != "config");
        let flag = flag.ok_or_else(|| {
            format!("the key '{key}' is no flag of serve; see sterna --help-all for their names")
        })?;
        let long = flag.get_long().expect("it was found by this name");
        if settings.iter().any(|setting| setting.flag == long) {
            return Err(format!(
                "'{key}' is given twice; keep one of '{long}' and its aliases"
            ));
        }
        settings.push(Setting {
            flag: long.to_owned(),
            values: values(key, value, flag)?,
        });
    }
    Ok(settings)
}

/// Returns the values of a key as the command line would give them.
///
/// # Errors
/// If the value has another type than the flag takes.
fn values(key: &str, value: &Value, flag: &Arg) -> Result<Vec<String>, String> {
    let is_switch = matches!(flag.get_action(), ArgAction::SetTrue);
    let takes_several = matches!(flag.get_action(), ArgAction::Append);
    match value {
        Value::Boolean(is_on) if is_switch => Ok(vec![is_on.to_string()]),
        other if is_switch => {
            let got = other.type_str();
            Err(format!(
                "'{key}' must be true or false; got a value of type {got}"
            ))
        }
        Value::String(text) => Ok(vec![text.clone()]),
        Value::Integer(number) => Ok(vec![number.to_string()]),
        Value::Float(number) => Ok(vec![number.to_string()]),
        Value::Array(items) if takes_several => {
            let text = |item: &Value| match item {
                Value::String(text) => Ok(text.clone()),
                other => {
                    let got = other.type_str();
                    Err(format!(
                        "'{key}' must have strings; got a value of type {got}"
                    ))
                }
            };
            items.iter().map(text).collect()
        }
        other => {
            let expected = if takes_several {
                "a string or an array of strings"
            } else {
                "a string or a number"
            };
            let got = other.type_str();
            Err(format!(
                "'{key}' must be {expected}; got a value of type {got}"
            ))
        }
    }
}

/// Returns the first paragraph of an error, without its label.
fn problem(error: &Error) -> String {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = text.find("\n\n").unwrap_or(text.len());
    text[..end].trim_end().to_owned()
}

/// Checks that the command line gives one model at most, and no command after its flags.
fn check_model(matches: &ArgMatches) -> Result<(), Error> {
    let serve = serve_matches(matches);
    let Some(path) = serve.get_one::<PathBuf>(MODEL[0]) else {
        return Ok(());
    };
    let shown = path.display();
    let commands = Cli::command();
    if commands.find_subcommand(path).is_some() && !path.exists() {
        let text = format!("the command '{shown}' must come before its flags\n");
        return Err(Error::raw(ErrorKind::ArgumentConflict, text));
    }
    if serve.value_source(MODEL[1]) == Some(ValueSource::CommandLine) {
        let text = format!("the model is given twice: '{shown}' and --model; give it once\n");
        return Err(Error::raw(ErrorKind::ArgumentConflict, text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::{Cli, CommandFactory};
    use crate::config::ServeConfig;

    /// A settings file that is removed at the end of a test.
    struct File(PathBuf);

    impl File {
        fn new(name: &str, text: &str) -> File {
            let name = format!("sterna-{}-{name}.toml", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::write(&path, text).unwrap();
            File(path)
        }
    }

    impl Drop for File {
        fn drop(&mut self) {
            std::fs::remove_file(&self.0).unwrap();
        }
    }

    fn read(flags: &[&str]) -> Result<ServeConfig, String> {
        let arguments = ["sterna"].iter().chain(flags).map(Into::into).collect();
        let cli = Cli::read_from(arguments).map_err(|error| error.to_string())?;
        Ok(match cli.command {
            Some(crate::config::Command::Serve(serve)) => *serve,
            None => cli.serve,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn a_wrong_flag_gets_advice_that_helps() {
        let error = read(&["--port", "abc"]).unwrap_err();
        assert!(error.contains("a whole number from 0 to 65535"), "{error}");
        // "-- --ctx-size" would make the flag the model.
        let error = read(&["--ctx-size", "5"]).unwrap_err();
        assert!(!error.contains("-- --ctx-size"), "{error}");
        let error = read(&["--ports", "5"]).unwrap_err();
        assert!(error.contains("'--port'"), "{error}");
    }

    #[test]
    fn help_fits_a_screen_and_help_all_has_every_flag() {
        for flags in [&["--help"][..], &["-h"], &["serve", "--help"]] {
            let help = read(flags).unwrap_err();
            let longest = help.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(help.lines().count() <= 50 && longest <= 130, "{help}");
            assert!(help.contains("--port <PORT>") && help.contains("--help-all"));
            assert!(!help.contains("--idle-seconds"), "{help}");
        }
        for flags in [&["--help-all"][..], &["serve", "--help-all"]] {
            let help = read(flags).unwrap_err();
            for flag in Cli::command()
                .get_arguments()
                .filter_map(|arg| arg.get_long())
            {
                assert!(help.contains(&format!("--{flag}")), "{flag}");
            }
            assert!(help.contains("[env: STERNA_IDLE_SECONDS]"), "{help}");
        }
    }

    #[test]
    fn each_command_has_help() {
        for name in Cli::command().get_subcommands().map(|it| it.get_name()) {
            for flag in ["-h", "--help"] {
                let help = read(&[name, flag]).unwrap_err();
                assert!(help.contains(&format!("Usage: sterna {name}")), "{help}");
                assert!(help.contains("-h, --help"), "{help}");
            }
        }
    }

    #[test]
    fn a_path_without_a_flag_is_the_model() {
        let path = |flags: &[&str]| read(flags).unwrap().model.path;
        let expected = Some(PathBuf::from("dir/model.gguf"));
        assert_eq!(path(&["dir/model.gguf"]), expected);
        assert_eq!(path(&["--port", "0", "dir/model.gguf"]), expected);
        assert_eq!(path(&["serve", "dir/model.gguf", "--port", "0"]), expected);
        assert_eq!(path(&["--model", "dir/model.gguf"]), expected);
        assert_eq!(path(&[]), None);
        let named = read(&["--served-model-name", "a", "/dir/model"])
            .unwrap()
            .model;
        assert_eq!(
            (named.names, named.path),
            (vec!["a".to_owned()], Some("/dir/model".into()))
        );
        let names = read(&["--served-model-name", "a", "b"]).unwrap().model;
        assert_eq!((names.names.len(), names.path), (2, None));
        let unclear = read(&["--served-model-name", "a", "org/b"]).unwrap_err();
        assert!(unclear.contains("also 'org/b'"), "{unclear}");
        let clear = read(&["org/b", "--served-model-name", "a", "org/b"]).unwrap();
        assert_eq!(clear.model.names.len(), 2);
        let twice = read(&["a", "--model", "b"]).unwrap_err();
        assert!(twice.contains("given twice: 'a' and --model"), "{twice}");
        let late = read(&["--port", "0", "bench"]).unwrap_err();
        assert!(late.contains("'bench' must come before"), "{late}");
    }

    #[test]
    fn the_file_gives_defaults_and_the_command_line_wins() {
        let named = "served-model-name = [\"a\", \"org/b\"]\n";
        let named = File::new("named", named);
        let named = read(&["--config", named.0.to_str().unwrap()])
            .unwrap()
            .model;
        assert_eq!(
            (named.names.len(), named.path),
            (2, None),
            "a list takes no model"
        );
        let text = "port = 8000\nmodel = \"m\"\nitl_strict = true\nmetrics-open = false\n\
                    served-model-name = [\"a\", \"b\"]\ncors-origin = \"https://example.com\"\n\
                    kv-memory = \"1GiB\"\nspeculate = 0\n";
        let file = File::new("defaults", text);
        let file = file.0.to_str().unwrap();
        for serve in [&[][..], &["serve"]] {
            let with = |flags: &[&str]| read(&[serve, &["--config", file], flags].concat());
            let config = with(&[]).unwrap();
            assert_eq!(config.network.port, 8000);
            assert_eq!(config.model.path, Some(PathBuf::from("m")));
            assert_eq!(config.model.names, ["a", "b"]);
            assert_eq!(config.network.allowed_origin, ["https://example.com"]);
            assert_eq!(config.kv_memory, Some(1 << 30));
            assert_eq!(config.scheduling.speculate, 0);
            assert!(config.scheduling.itl_strict && !config.access.metrics_open);
            let flags = ["--port", "1", "--model-name", "c", "--model", "n"];
            let config = with(&flags).unwrap();
            assert_eq!(config.network.port, 1);
            assert_eq!(config.model.names, ["c"]);
            assert_eq!(config.model.path, Some(PathBuf::from("n")));
            assert_eq!(
                with(&["other"]).unwrap().model.path,
                Some(PathBuf::from("other"))
            );
        }
    }

    #[test]
    fn an_error_in_the_file_names_the_file_and_the_key() {
        for (index, (text, expected)) in [
            ("prot = 1", "the key 'prot' is no flag"),
            ("config = \"x\"", "the key 'config' is no flag"),
            ("depths = 256", "the key 'depths' is no flag"),
            ("[network]\nport = 1", "the key 'network' is no flag"),
            ("port = 70000", "invalid value '70000' for '--port"),
            (
                "port = [1]",
                "'port' must be a string or a number; got a value of type array",
            ),
            ("itl-strict = 1", "'itl-strict' must be true or false"),
            ("allowed-host = [1]", "'allowed-host' must have strings"),
            (
                "model-name = \"a\"\nserved-model-name = \"b\"",
                "given twice",
            ),
            ("port = ", "TOML parse error"),
            (
                "kv-dtype = \"int4\"",
                "invalid value 'int4' for '--kv-dtype",
            ),
        ]
        .into_iter()
        .enumerate()
        {
            let file = File::new(&format!("error-{index}"), text);
            let path = file.0.to_str().unwrap();
            let error = read(&["--config", path]).unwrap_err();
            assert!(
                error.contains(expected) && error.contains(path),
                "{text}: {error}"
            );
        }
        let missing = read(&["--config", "/no/such/file.toml"]).unwrap_err();
        assert!(
            missing.contains("/no/such/file.toml: No such file"),
            "{missing}"
        );
    }

    #[test]
    fn every_flag_of_serve_has_an_environment_variable() {
        let command = super::command(&[]);
        let serve = command.find_subcommand(super::SERVE).unwrap();
        for flag in command.get_arguments().chain(serve.get_arguments()) {
            let Some(long) = flag.get_long().filter(|long| !long.starts_with("help")) else {
                continue;
            };
            let name = flag.get_env().map(|name| name.to_str().unwrap());
            let name = name.unwrap_or_else(|| panic!("--{long} has none"));
            let expected = long.replace('-', "_").to_uppercase();
            assert_eq!(name.strip_prefix("STERNA_"), Some(expected.as_str()));
        }
    }
}
