//! The cache of downloaded models, in the layout of Hugging Face's own programs.
//!
//! ```text
//! models--OWNER--NAME/blobs/HASH               the content of a file
//! models--OWNER--NAME/blobs/HASH.incomplete    the part of it that was downloaded
//! models--OWNER--NAME/snapshots/COMMIT/PATH    a link to the content
//! models--OWNER--NAME/refs/main                the commit that was complete last
//! .locks/models--OWNER--NAME/HASH.lock         held by the process that downloads it
//! ```

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::listing::HubFile;
use super::model_name::ModelName;

/// The branch that a name means.
pub(super) const BRANCH: &str = "main";
/// The most files and the deepest folders of a snapshot that are looked at.
const MAX_SNAPSHOT_FILES: usize = 50_000;
const MAX_DEPTH: usize = 8;

/// The part of the cache that belongs to a model.
pub(super) struct RepoCache {
    root: PathBuf,
    locks: PathBuf,
}

impl RepoCache {
    pub(super) fn new(cache: &Path, name: &ModelName) -> RepoCache {
        RepoCache {
            root: cache.join(name.folder()),
            locks: cache.join(".locks").join(name.folder()),
        }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of the content of a file.
    pub(super) fn blob(&self, file: &HubFile) -> PathBuf {
        self.root.join("blobs").join(file.hash.digits())
    }

    /// Returns whether the content of a file is there.
    pub(super) fn has(&self, file: &HubFile) -> bool {
        let is_whole = |blob: fs::Metadata| blob.is_file() && blob.len() == file.bytes;
        fs::metadata(self.blob(file)).is_ok_and(is_whole)
    }

    /// Returns the directory of a commit's files.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// Links a file of a commit to its content.
    pub(super) fn link(&self, commit: &str, file: &HubFile) -> Result<(), String> {
        let path = self.snapshot(commit).join(&file.path);
        let up = "../".repeat(2 + file.path.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{}", file.hash.digits()));
        let error = |error| of_path(&path, &error);
        create_parent(&path)?;
        match symlink(&target, &path) {
            Err(exists) if exists.kind() == ErrorKind::AlreadyExists => {}
            other => return other.map_err(error),
        }
        if fs::read_link(&path).is_ok_and(|linked| linked == target) {
            return Ok(());
        }
        // Other programs write a file where the file system has no links. It stays if that is so.
        let new = temporary(&path);
        symlink(&target, &new)
            .and_then(|()| fs::rename(&new, &path))
            .map_err(error)
    }

    /// Waits until no other process downloads the content of a file, and keeps others from it until
    /// the result is dropped.
    pub(super) fn lock(&self, file: &HubFile) -> Result<File, String> {
        let path = self.locks.join(format!("{}.lock", file.hash.digits()));
        let error = |error| of_path(&path, &error);
        create_parent(&path)?;
        let lock = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(error)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                tracing::info!(
                    file = file.path,
                    "waiting: another process downloads the file"
                );
                lock.lock().map_err(error)?;
            }
            Err(TryLockError::Error(why)) => return Err(error(why)),
        }
        Ok(lock)
    }

    /// Returns the commit that was complete last.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn read_commit(&self) -> Result<String, String> {
        let path = self.root.join("refs").join(BRANCH);
        let text = fs::read_to_string(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => "it was not downloaded yet".to_owned(),
            _ => of_path(&path, &error),
        })?;
        let commit = text.trim();
        let is_plain = commit.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if commit.is_empty() || commit.len() > 64 || !is_plain {
            return Err(format!("{}: it has no commit", path.display()));
        }
        Ok(commit.to_owned())
    }

    /// Notes the commit that is complete. A cache that knows it already need not be writable.
    pub(super) fn write_commit(&self, commit: &str) -> Result<(), String> {
        if self.read_commit().as_deref() == Ok(commit) {
            return Ok(());
        }
        let path = self.root.join("refs").join(BRANCH);
        create_parent(&path)?;
        let new = temporary(&path);
        fs::write(&new, commit)
            .and_then(|()| fs::rename(&new, &path))
            .map_err(|error| of_path(&path, &error))
    }

    /// Returns the paths of the files of a commit that are there.
    pub(super) fn files(&self, commit: &str) -> Result<Vec<String>, String> {
        let root = self.snapshot(commit);
        let mut paths = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            let directory = root.join(&folder);
            let error = |error| of_path(&directory, &error);
            for entry in fs::read_dir(&directory).map_err(error)? {
                let entry = entry.map_err(error)?;
                let path = format!("{folder}{}", entry.file_name().to_string_lossy());
                let Ok(metadata) = fs::metadata(entry.path()) else {
                    continue; // A link to a content that was deleted.
                };
                if metadata.is_file() {
                    paths.push(path);
                } else if path.matches('/').count() < MAX_DEPTH {
                    folders.push(path + "/");
                }
            }
            if paths.len() + folders.len() > MAX_SNAPSHOT_FILES {
                return Err(format!("{} has too many files", root.display()));
            }
        }
        Ok(paths)
    }
}

/// Returns a path beside `path` that no other process and no other thread uses.
fn temporary(path: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut name = path.as_os_str().to_owned();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    name.push(format!(".{}-{number}.new", std::process::id()));
    name.into()
}

/// Creates the directory of `path`.
pub(super) fn create_parent(path: &Path) -> Result<(), String> {
    let parent = path.parent().expect("the path is in the cache");
    fs::create_dir_all(parent).map_err(|error| of_path(parent, &error))
}

/// Returns the message of an error about a path of the cache. A full disk is the likely one, so
/// the message says what helps.
pub(super) fn of_path(path: &Path, error: &io::Error) -> String {
    let advice = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            ". Free some space, or set HF_HOME to a directory on another disk; what was downloaded \
             is kept"
        }
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            ". Set HF_HOME to a directory that this process may write"
        }
        _ => "",
    };
    format!("{}: {error}{advice}", path.display())
}
