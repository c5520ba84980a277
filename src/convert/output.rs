//! Where a conversion is written, and how it gets its name.
//!
//! Invariant: until [`Output::commit`] nothing outside a directory of its own changes, and that
//! directory is removed, whatever happens.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;

use crate::checkpoint::convert::Container;
use crate::checkpoint::{Source, TOOL_TEMPLATE_FILE};

/// The files about text that win over the metadata of a GGUF file beside them.
const WINNING_FILES: [&str; 4] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    TOOL_TEMPLATE_FILE,
];

/// A conversion that is not in place yet.
pub(super) struct Output {
    out: PathBuf,
    /// A directory beside `out`.
    temporary: PathBuf,
    parent: PathBuf,
    replaces: bool,
}

impl Output {
    /// Makes the directory in which the conversion is written.
    ///
    /// # Errors
    /// If `out` exists and `force` is false, if it is the input or no checkpoint, or if its
    /// directory cannot be written.
    pub(super) fn begin(input: &Path, out: &Path, force: bool) -> Result<Output, String> {
        let shown = out.display();
        let name = out
            .file_name()
            .ok_or_else(|| format!("{shown}: it has no name"))?;
        let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new(".")).to_owned();
        let replaces = fs::symlink_metadata(out).is_ok();
        if replaces && !force {
            return Err(format!("{shown}: it exists; give --force to replace it"));
        }
        if replaces {
            let same = |path: &Path| path.canonicalize().ok();
            if same(input).is_some_and(|input| Some(input) == same(out)) {
                return Err(format!("{shown}: IN and OUT are the same"));
            }
            refuse_other_directory(out)?;
        }
        let hidden = format!(".{}.sterna-{}", name.to_string_lossy(), process::id());
        let temporary = parent.join(hidden);
        let made = fs::create_dir(&temporary);
        made.map_err(|error| format!("{}: {error}", temporary.display()))?;
        Ok(Output {
            out: out.to_owned(),
            temporary,
            parent,
            replaces,
        })
    }

    /// Returns where to write the checkpoint.
    pub(super) fn path(&self) -> PathBuf {
        let name = self.out.file_name().expect("it was checked at the begin");
        self.temporary.join(name)
    }

    /// Adds a small file: in the directory, in the folder of a `.bin` file, or beside a GGUF file.
    pub(super) fn add(&self, container: Container, name: &str, content: &[u8]) -> io::Result<()> {
        let directory = match container {
            Container::HuggingFace => self.path(),
            Container::Bin => self.path().with_extension(""),
            Container::Gguf(_) => self.temporary.clone(),
        };
        let mut file = File::create_new(directory.join(name))?;
        file.write_all(content)?;
        file.sync_all()
    }

    /// # Errors
    /// If a file beside `out` would win over the tokenizer or the template in a GGUF file.
    pub(super) fn refuse_other_text(
        &self,
        source: &Source,
        container: Container,
    ) -> Result<(), String> {
        if !matches!(container, Container::Gguf(_)) {
            return Ok(());
        }
        for name in WINNING_FILES {
            let path = self.parent.join(name);
            let Ok(content) = fs::read(&path) else {
                continue;
            };
            let own = source.read(name).map_err(|error| error.to_string())?;
            if own.as_deref() != Some(&content[..]) {
                return Err(format!(
                    "{}: it belongs to another model, but would be used for OUT, which lies beside \
                     it; choose another directory",
                    path.display()
                ));
            }
        }
        Ok(())
    }

    /// Gives the conversion and the files beside it their final names.
    pub(super) fn commit(self) -> Result<(), String> {
        let named = |path: &Path, error: io::Error| format!("{}: {error}", path.display());
        let entries = fs::read_dir(&self.temporary).and_then(|entries| {
            let names = entries.map(|entry| entry.map(|entry| entry.file_name()));
            names.collect::<io::Result<Vec<_>>>()
        });
        let mut names = entries.map_err(|error| named(&self.temporary, error))?;
        // OUT comes last: once it is there, everything is.
        names.sort_by_key(|name| Some(name.as_os_str()) == self.out.file_name());
        for name in &names {
            let path = self.parent.join(name);
            if path.exists() && !self.replaces {
                let shown = path.display();
                return Err(format!("{shown}: it exists; give --force to replace it"));
            }
            refuse_other_directory(&path)?;
        }
        for name in &names {
            let (new, path) = (self.temporary.join(name), self.parent.join(name));
            if new.is_dir() {
                sync(&new).map_err(|error| named(&new, error))?;
            }
            self.put_in_place(&new, &path)
                .map_err(|error| named(&path, error))?;
        }
        sync(&self.parent).map_err(|error| named(&self.parent, error))
    }

    /// Renames `new` to `path`. What has that name is removed with the temporary directory.
    fn put_in_place(&self, new: &Path, path: &Path) -> io::Result<()> {
        if !path.is_dir() {
            return fs::rename(new, path);
        }
        // A directory cannot be renamed over another one.
        let old = new.with_extension("replaced");
        fs::rename(path, &old)?;
        fs::rename(new, path).or_else(|error| {
            fs::rename(&old, path)?;
            Err(error)
        })
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.temporary) {
            tracing::warn!(directory = %self.temporary.display(), %error, "cannot be removed");
        }
    }
}

/// # Errors
/// If `out` is a directory with anything but the files of a checkpoint or a tokenizer.
fn refuse_other_directory(out: &Path) -> Result<(), String> {
    if !out.is_dir() {
        return Ok(());
    }
    let entries = fs::read_dir(out).map_err(|error| format!("{}: {error}", out.display()))?;
    let only_files = entries.flatten().all(|entry| entry.path().is_file());
    let is_known = ["config.json", "tokenizer.json"]
        .iter()
        .any(|name| out.join(name).exists());
    if only_files && is_known {
        return Ok(());
    }
    Err(format!(
        "{}: it is not the directory of a checkpoint, so --force does not replace it; remove it \
         yourself",
        out.display()
    ))
}

/// Writes the entries of a directory to the disk.
fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}
