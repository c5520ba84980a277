//! A file that is being downloaded.
//!
//! Invariant: the hash covers the bytes that the file has. An earlier try may have left some.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::thread;

use sha1::Sha1;
use sha2::digest::DynDigest;
use sha2::{Digest, Sha256};

use super::cache::{RepoCache, create_parent, of_path};
use super::client::{HubClient, HubFailure};
use super::listing::{FileHash, HubFile};

/// The bytes that are read at once.
const BUFFER_BYTES: usize = 256 << 10;

/// The part of a file that is there.
pub(super) struct PartialFile<'a> {
    file: &'a HubFile,
    /// The place of the whole file.
    blob: PathBuf,
    path: PathBuf,
    part: File,
    bytes: u64,
    hash: Box<dyn DynDigest>,
    /// Whether an earlier process has left some of the bytes.
    is_resumed: bool,
}

impl<'a> PartialFile<'a> {
    /// Opens what earlier tries have left of a file, and computes its hash.
    ///
    /// # Errors
    /// If the cache cannot be written or read.
    pub(super) fn open(cache: &RepoCache, file: &'a HubFile) -> Result<PartialFile<'a>, String> {
        let blob = cache.blob(file);
        let path = blob.with_extension("incomplete");
        create_parent(&path)?;
        let options = OpenOptions::new()
            .create(true)
            .append(true)
            .read(true)
            .open(&path);
        let mut partial = PartialFile {
            file,
            blob,
            part: options.map_err(|error| of_path(&path, &error))?,
            path,
            bytes: 0,
            hash: new_hash(file),
            is_resumed: false,
        };
        let kept = partial
            .part
            .metadata()
            .map_err(|error| partial.error(&error))?
            .len();
        match kept > file.bytes {
            true => partial.restart()?,
            false => partial
                .hash_kept(kept)
                .map_err(|error| partial.error(&error))?,
        }
        Ok(partial)
    }

    /// Returns the number of bytes that are there.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Downloads the rest, and gives the file its name in the cache. A try that fails for a passing
    /// reason is repeated. `report` is called with the number of bytes.
    ///
    /// # Errors
    /// If several tries in a row bring no byte, the hash is wrong, or the disk is full.
    pub(super) fn complete(
        mut self,
        client: &HubClient,
        commit: &str,
        mut report: impl FnMut(u64),
    ) -> Result<(), String> {
        let mut fruitless = 0;
        let mut furthest = self.bytes; // A server that resumes nothing begins again and again.
        report(self.bytes);
        loop {
            let failed = match self.append(client, commit, &mut report) {
                Ok(()) => match self.finish()? {
                    true => return Ok(()),
                    false => continue,
                },
                Err(failure) => failure,
            };
            let has_brought_bytes = furthest < self.bytes;
            furthest = furthest.max(self.bytes);
            let pause = client.pause_after(failed, has_brought_bytes, &mut fruitless);
            let pause = pause.map_err(|failed| match (self.bytes, failed.reason()) {
                (0, problem) => problem,
                (bytes, problem) => {
                    format!("{problem}. The first {bytes} bytes are kept; start again to resume")
                }
            })?;
            thread::sleep(pause);
        }
    }

    /// Appends what one request brings.
    fn append(
        &mut self,
        client: &HubClient,
        commit: &str,
        report: &mut impl FnMut(u64),
    ) -> Result<(), HubFailure> {
        if self.bytes == self.file.bytes {
            return Ok(());
        }
        let mut content = client.content(commit, self.file, self.bytes)?;
        if content.first_byte != self.bytes {
            tracing::info!(
                file = self.file.path,
                "the server resumes no file; starting again"
            );
            self.restart().map_err(HubFailure::Lasting)?;
        }
        let path = &self.file.path;
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let read = content.body.read(&mut buffer).map_err(|error| {
                HubFailure::Passing(format!("{path}: the connection broke: {error}"))
            })?;
            if read == 0 {
                break;
            }
            let (bytes, all) = (self.bytes + read as u64, self.file.bytes);
            if bytes > all {
                let problem = format!("{path}: the server sends more than the listed {all} bytes");
                return Err(HubFailure::Lasting(problem));
            }
            let written = self.part.write_all(&buffer[..read]);
            written.map_err(|error| HubFailure::Lasting(self.error(&error)))?;
            self.hash.update(&buffer[..read]);
            self.bytes = bytes;
            report(bytes);
        }
        if self.bytes < self.file.bytes {
            let (bytes, all) = (self.bytes, self.file.bytes);
            let problem = format!("{path}: the connection ended after {bytes} of {all} bytes");
            return Err(HubFailure::Passing(problem));
        }
        Ok(())
    }

    /// Checks the hash and renames the file. Returns false if the bytes of an earlier process made
    /// the hash wrong, so that the download begins again.
    fn finish(&mut self) -> Result<bool, String> {
        let hash = self.hash.finalize_reset();
        let found: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        let expected = self.file.hash.digits();
        let path = &self.file.path;
        if found == expected {
            self.part.sync_all().map_err(|error| self.error(&error))?;
            fs::rename(&self.path, &self.blob).map_err(|error| self.error(&error))?;
            return Ok(true);
        }
        if self.is_resumed {
            tracing::warn!(
                file = path,
                "what an earlier start has left is wrong; starting again"
            );
            self.restart()?;
            return Ok(false);
        }
        fs::remove_file(&self.path).map_err(|error| self.error(&error))?;
        Err(format!(
            "{path}: the hash is {found}, but the hub lists {expected}; the file is deleted. Start \
             again; if that fails too, the server or a proxy changes the file"
        ))
    }

    /// Drops all bytes.
    fn restart(&mut self) -> Result<(), String> {
        self.part.set_len(0).map_err(|error| self.error(&error))?;
        self.bytes = 0;
        self.hash = new_hash(self.file);
        self.is_resumed = false;
        Ok(())
    }

    /// Adds the bytes that are there to the hash.
    fn hash_kept(&mut self, kept: u64) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut rest = (&self.part).take(kept);
        loop {
            let read = rest.read(&mut buffer)?;
            if read == 0 {
                break;
            }
            self.hash.update(&buffer[..read]);
            self.bytes += read as u64;
        }
        self.is_resumed = self.bytes > 0;
        Ok(())
    }

    fn error(&self, error: &io::Error) -> String {
        of_path(&self.path, error)
    }
}

/// Returns the hash of no bytes.
fn new_hash(file: &HubFile) -> Box<dyn DynDigest> {
    match file.hash {
        FileHash::Sha256(_) => Box::new(Sha256::new()),
        FileHash::GitBlob(_) => Box::new(Sha1::new_with_prefix(format!("blob {}\0", file.bytes))),
    }
}
