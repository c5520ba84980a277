//! Which model the flags mean: where it is on this machine, and its name in the API.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::checkpoint::{ModelConfig, Source};
use crate::config::{ModelFlags, similar_command};
use crate::hub::{self, HubSettings, ModelName};

const DEMO_NAME: &str = "sterna-demo";

/// The model that the flags mean.
pub(super) struct FoundModel {
    /// `None` means the embedded demo.
    pub(super) path: Option<PathBuf>,
    /// The name in the API.
    pub(super) name: String,
}

impl FoundModel {
    /// Checks what can be checked of the model's path without a download.
    ///
    /// # Errors
    /// If the path is no name on the hub, and nothing is there.
    pub(super) fn check(flags: &ModelFlags) -> Result<(), String> {
        match &flags.path {
            Some(path) if ModelName::find(path)?.is_none() => name_of(path).map(drop),
            _ => Ok(()),
        }
    }

    /// Finds the model. If it is given by its name on the hub and the cache lacks it, downloads it.
    ///
    /// # Errors
    /// If there is no such model, or the download fails.
    pub(super) fn find(flags: &ModelFlags) -> Result<FoundModel, String> {
        let (path, own_name) = match &flags.path {
            None => (None, Some(DEMO_NAME.to_owned())),
            Some(path) => match ModelName::find(path)? {
                Some(name) => {
                    let settings = HubSettings::from_environment(flags.offline)?;
                    let path = hub::fetch(&name, &settings, check_config)?;
                    (Some(path), Some(name.repository()))
                }
                None => (Some(path.clone()), name_of(path)?),
            },
        };
        let name = flags.names.first().cloned().or(own_name);
        let unnamed = "the model's directory has no name; give one with --served-model-name";
        Ok(FoundModel {
            path,
            name: name.ok_or(unnamed)?,
        })
    }
}

/// Checks whether a directory without weights has a configuration that this server can serve.
fn check_config(directory: &Path) -> Result<(), String> {
    let read = |source| ModelConfig::read(&source);
    let config = Source::open(directory).and_then(read);
    config.map(drop).map_err(|error| error.to_string())
}

/// Returns the name of a directory, or of a file without its extension.
fn name_of(path: &Path) -> Result<Option<String>, String> {
    let path = path.canonicalize().map_err(|error| {
        let shown = path.display();
        let similar = path.to_str().and_then(similar_command);
        if let Some(name) = path.to_str().and_then(ModelName::hidden_in) {
            return format!(
                "{shown}: there is no such file or directory. A model of the Hugging Face Hub is \
                 given by its name alone, {name}, and its branch main is served"
            );
        }
        match (error.kind(), similar) {
            (ErrorKind::NotFound, Some(command)) => format!(
                "{shown}: there is no such file or directory, and no such command. Did you mean \
                 sterna {command}?"
            ),
            (ErrorKind::NotFound, None) => format!(
                "{shown}: there is no such file or directory. Give the path of a model, its name \
                 on the Hugging Face Hub (OWNER/NAME), or one of the commands that sterna --help \
                 lists"
            ),
            _ => format!("{shown}: {error}"),
        }
    })?;
    let name = if path.is_dir() {
        path.file_name()
    } else {
        path.file_stem()
    };
    Ok(name.map(|name| name.to_string_lossy().into_owned()))
}
