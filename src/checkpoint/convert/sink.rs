//! The files that a conversion writes, and who watches it.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::ProgressBar;

use crate::checkpoint::{LoadError, LoadResult};

/// Who watches a conversion: a progress bar over the bytes of tensors, and a flag that ends it.
#[derive(Clone)]
pub struct Watch {
    /// Counts the bytes of tensors that are written and compared.
    pub progress: ProgressBar,
    /// Ends the conversion with an error when it is set.
    pub interrupted: Arc<AtomicBool>,
}

impl Watch {
    /// Returns a watch that shows nothing and never ends a conversion.
    pub fn hidden() -> Watch {
        Watch {
            progress: ProgressBar::hidden(),
            interrupted: Arc::default(),
        }
    }

    /// Counts bytes of the input.
    ///
    /// # Errors
    /// If the conversion should end.
    pub(super) fn advance(&self, bytes: usize) -> LoadResult<()> {
        self.progress.inc(bytes as u64);
        if self.interrupted.load(Ordering::Relaxed) {
            return Err(LoadError::file("the conversion", "interrupted"));
        }
        Ok(())
    }
}

/// A file that is written.
pub(super) struct Sink {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Sink {
    pub(super) fn create(path: &Path) -> LoadResult<Sink> {
        let file = File::create_new(path);
        let file = file.map_err(|error| LoadError::file(path.display(), error))?;
        Ok(Sink {
            path: path.to_owned(),
            file: BufWriter::with_capacity(1 << 20, file),
        })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> LoadResult<()> {
        let result = self.file.write_all(bytes);
        result.map_err(|error| LoadError::file(self.path.display(), error))
    }

    /// Writes the bytes of a tensor as they are.
    pub(super) fn carry(&mut self, bytes: &[u8], watch: &Watch) -> LoadResult<()> {
        for bytes in bytes.chunks(1 << 20) {
            self.write(bytes)?;
            watch.advance(bytes.len())?;
        }
        Ok(())
    }

    /// Writes everything to the disk.
    pub(super) fn finish(mut self) -> LoadResult<()> {
        let result = self
            .file
            .flush()
            .and_then(|()| self.file.get_ref().sync_all());
        result.map_err(|error| LoadError::file(self.path.display(), error))
    }
}

/// Writes a small file.
pub(super) fn write_file(path: &Path, content: &[u8]) -> LoadResult<()> {
    let mut sink = Sink::create(path)?;
    sink.write(content)?;
    sink.finish()
}
