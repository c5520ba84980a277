//! Models by their name on the Hugging Face Hub, or on a server with the same HTTP interface.
//!
//! [`fetch`] turns `OWNER/NAME` or `OWNER/NAME:CHOICE` into a path. What the loader needs and the
//! cache lacks is downloaded. The steps:
//!
//! 1. `client.rs` asks the hub which commit the branch `main` is, and which files it has, with
//!    their sizes and hashes (`listing.rs`).
//! 2. `needed.rs` says which of the files the loader needs.
//! 3. `partial_file.rs` downloads a file, from where an earlier try stopped, and checks its hash.
//! 4. `cache.rs` gives the file its place. The cache is the one of Hugging Face's own programs.
//!
//! The crate `hf-hub` 1.0 was rejected. It begins an interrupted file again, checks no hash, and
//! depends on a second protocol of downloads (`hf-xet`) and an asynchronous client.
//!
//! Invariant: the token goes to the host of the endpoint alone, never to a host that a redirect
//! names, and stands in no message.
//!
//! Invariant: a file gets its name in the cache after its bytes have the listed size and hash.
//!
//! Invariant: names and hashes of a listing are checked before they become paths.

mod cache;
mod client;
mod listing;
mod model_name;
mod needed;
mod partial_file;
mod settings;

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use self::cache::RepoCache;
use self::client::{HubClient, HubFailure};
use self::listing::{HubFile, HubListing};
use self::needed::NeededFiles;
use self::partial_file::PartialFile;
use crate::checkpoint::SAFETENSORS_INDEX;

pub use self::model_name::ModelName;
pub use self::settings::{HubSettings, HubToken};

/// The largest index of shards that is read.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// How often the log says how far the download is.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Returns the path of a model of the hub in the cache. What the cache lacks is downloaded, unless
/// the settings forbid it. `check` says of a directory that has all files except the weights
/// whether the weights are worth a download.
///
/// # Errors
/// If the hub or the cache lacks the model, several files would do, `check` fails, a download
/// fails, or the disk is full.
pub fn fetch(
    name: &ModelName,
    settings: &HubSettings,
    check: impl FnOnce(&Path) -> Result<(), String>,
) -> Result<PathBuf, String> {
    let cache = RepoCache::new(&settings.cache, name);
    if settings.is_offline {
        let (path, commit) = cached(name, &cache).map_err(|problem| {
            format!(
                "{problem}. Nothing is downloaded with --offline or HF_HUB_OFFLINE; start once \
                 without them"
            )
        })?;
        let model = name.repository();
        tracing::info!(model, commit, "the model is in the cache");
        return Ok(path);
    }
    let client = HubClient::new(settings, name);
    let listing = client.listing().map_err(|failed| match failed {
        HubFailure::Lasting(problem) => problem,
        HubFailure::Passing(problem) if cached(name, &cache).is_ok() => {
            format!("{problem}. The cache has this model: start with --offline")
        }
        HubFailure::Passing(problem) => format!(
            "{problem}. The cache has no copy of this model. Check the network, and HF_ENDPOINT \
             and HTTPS_PROXY if they are set"
        ),
    })?;
    let in_repository = |error| format!("{}: {error}", name.repository());
    let paths: BTreeSet<&str> = listing.files.iter().map(|file| &*file.path).collect();
    let needed = NeededFiles::find(&paths, name.choice.as_deref()).map_err(in_repository)?;
    let mut download = Download {
        client: &client,
        cache: &cache,
        listing: &listing,
        progress: progress_bar(),
        reported: Instant::now(),
    };
    let snapshot = cache.snapshot(&listing.commit);
    let (texts, weights) = needed.texts_and_weights();
    download.files(&texts)?;
    if needed.is_directory() {
        check(&snapshot)
            .map_err(|error| in_repository(format!("{error}. No weights were downloaded")))?;
    }
    download.files(&weights)?;
    if needed.has_index {
        let shards = shards(&snapshot, &needed, &paths).map_err(in_repository)?;
        download.files(&shards)?;
    }
    download.progress.finish_and_clear();
    cache.write_commit(&listing.commit)?;
    Ok(needed.path_in(&snapshot))
}

/// Returns the path of a model that the cache has, and its commit.
///
/// # Errors
/// If the cache lacks the model or one of its files.
fn cached(name: &ModelName, cache: &RepoCache) -> Result<(PathBuf, String), String> {
    let incomplete = |problem: String| {
        let (repository, root) = (name.repository(), cache.root().display());
        format!("{repository}: {problem} (in the cache {root})")
    };
    let commit = cache.read_commit().map_err(incomplete)?;
    let snapshot = cache.snapshot(&commit);
    let paths = cache.files(&commit).map_err(incomplete)?;
    let paths: BTreeSet<&str> = paths.iter().map(String::as_str).collect();
    let needed = NeededFiles::find(&paths, name.choice.as_deref()).map_err(incomplete)?;
    if needed.has_index {
        shards(&snapshot, &needed, &paths).map_err(incomplete)?;
    }
    Ok((needed.path_in(&snapshot), commit))
}

/// Returns the shards that the index in a snapshot lists.
fn shards(
    snapshot: &Path,
    needed: &NeededFiles,
    paths: &BTreeSet<&str>,
) -> Result<Vec<String>, String> {
    let path = snapshot.join(SAFETENSORS_INDEX);
    let error = |error: io::Error| format!("{}: {error}", path.display());
    let bytes = fs::metadata(&path).map_err(error)?.len();
    if bytes > MAX_INDEX_BYTES {
        return Err(format!(
            "{SAFETENSORS_INDEX} has {bytes} bytes; the limit is {MAX_INDEX_BYTES}"
        ));
    }
    needed.shards(&fs::read(&path).map_err(error)?, paths)
}

/// The download of a model's files.
struct Download<'a> {
    client: &'a HubClient,
    cache: &'a RepoCache,
    listing: &'a HubListing,
    progress: ProgressBar,
    reported: Instant, // When the log last said how far it is.
}

impl Download<'_> {
    /// Puts the files of these paths into the snapshot.
    fn files(&mut self, paths: &[String]) -> Result<(), String> {
        let files: Vec<&HubFile> = paths
            .iter()
            .map(|path| self.listing.file(path).expect("the path is of the listing"))
            .collect();
        for file in files.iter().filter(|file| !self.cache.has(file)) {
            self.progress.inc_length(file.bytes);
        }
        for file in files {
            if !self.cache.has(file) {
                self.file(file)?;
            }
            self.cache.link(&self.listing.commit, file)?;
        }
        Ok(())
    }

    /// Downloads a file. Another process that downloads the same file is waited for.
    fn file(&mut self, file: &HubFile) -> Result<(), String> {
        let _lock = self.cache.lock(file)?;
        if self.cache.has(file) {
            self.progress.inc(file.bytes);
            return Ok(());
        }
        let partial = PartialFile::open(self.cache, file)?;
        let kept = partial.bytes();
        tracing::info!(file = file.path, bytes = file.bytes, kept, "downloading");
        self.progress.set_message(file.path.clone());
        let before = self.progress.position();
        let (progress, reported) = (&self.progress, &mut self.reported);
        partial.complete(self.client, &self.listing.commit, |bytes| {
            progress.set_position(before + bytes);
            if reported.elapsed() >= REPORT_INTERVAL {
                *reported = Instant::now();
                let percent = 100 * bytes / file.bytes.max(1);
                tracing::info!(file = file.path, bytes, percent, "downloading");
            }
        })
    }
}

/// Returns a progress bar, which is hidden if nobody would see it.
fn progress_bar() -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let template = "downloading {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {wide_msg}";
    let style = ProgressStyle::with_template(template).expect("the template is well-formed");
    ProgressBar::new(0).with_style(style)
}
