//! The contents of the files that hold tensors, mapped into memory.
#![expect(unsafe_code, reason = "mapping a file")]

use std::fs::File;

use memmap2::{Advice, Mmap, UncheckedAdvice};

use super::error::{LoadError, LoadResult};
use super::folder::{FileBytes, Folder, regular_file};

/// The contents of the files that hold tensors.
pub(super) struct MappedFiles<'a>(Vec<OpenedFile<'a>>);

/// The content of one file.
enum OpenedFile<'a> {
    Mapped(Mmap),
    Memory(FileBytes<'a>),
}

impl<'a> MappedFiles<'a> {
    /// Opens the files of these names.
    ///
    /// # Errors
    /// If one of them is missing or cannot be mapped.
    pub(super) fn open(folder: &'a Folder, names: &[String]) -> LoadResult<MappedFiles<'a>> {
        let contents = names.iter().map(|name| OpenedFile::open(folder, name));
        Ok(MappedFiles(contents.collect::<Result<_, _>>()?))
    }

    /// Returns the bytes of each file.
    pub(super) fn contents(&self) -> Vec<&[u8]> {
        self.0.iter().map(OpenedFile::bytes).collect()
    }

    /// Returns the memory of `bytes`, a part of these files, to the system. If these bytes are read
    /// again, the system reads the file again.
    ///
    /// Otherwise the model would be in memory twice by the time that the last tensor is packed.
    pub(super) fn release(&self, bytes: &[u8]) {
        for contents in &self.0 {
            let OpenedFile::Mapped(map) = contents else {
                continue; // The memory belongs to the folder.
            };
            let Some(offset) = bytes.as_ptr().addr().checked_sub(map.as_ptr().addr()) else {
                continue;
            };
            if offset + bytes.len() <= map.len() {
                // SAFETY: the map is read-only, so its pages hold nothing except what the file
                // holds. Dropping pages, including the neighbours that share the first and the last
                // page, only makes the system read them again.
                let dropped = unsafe {
                    map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, bytes.len())
                };
                let _ = dropped; // If the system refuses, the bytes stay until the file is closed.
            }
        }
    }
}

impl<'a> OpenedFile<'a> {
    fn open(folder: &'a Folder, name: &str) -> LoadResult<OpenedFile<'a>> {
        let Folder::Directory(directory) = folder else {
            let bytes = folder.read(name)?.map(OpenedFile::Memory);
            return bytes.ok_or_else(|| folder.missing_file(name));
        };
        let path = directory.join(name);
        if regular_file(&path)?.is_none() {
            return Err(folder.missing_file(name));
        }
        let file = File::open(&path).map_err(|error| LoadError::file(path.display(), error))?;
        // SAFETY: nobody changes the file while it is mapped: deploy/README.md asks the operator to
        // replace model files instead of writing into them. The map ends before the server serves.
        // Truncating the file meanwhile would end the process by a signal.
        let map =
            unsafe { Mmap::map(&file) }.map_err(|error| LoadError::file(path.display(), error))?;
        // Only a hint: without it, reading is a little slower.
        let _ = map.advise(Advice::WillNeed);
        Ok(OpenedFile::Mapped(map))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            OpenedFile::Mapped(map) => map,
            OpenedFile::Memory(bytes) => bytes,
        }
    }
}
