//! What a template writes, up to a limit.

use std::io;

const MAX_OUTPUT_BYTES: usize = 16 << 20;

/// A text that is being written. A write beyond the limit fails.
#[derive(Default)]
pub(super) struct LimitedOutput {
    bytes: Vec<u8>,
    is_full: bool,
}

impl LimitedOutput {
    /// Returns what is wrong if a write has failed.
    pub(super) fn error(&self) -> Option<String> {
        self.is_full
            .then(|| format!("the rendered conversation has more than {MAX_OUTPUT_BYTES} bytes"))
    }

    /// Returns the text.
    pub(super) fn into_text(self) -> String {
        String::from_utf8(self.bytes).expect("a template writes text")
    }
}

impl io::Write for LimitedOutput {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if text.len() > MAX_OUTPUT_BYTES - self.bytes.len() {
            self.is_full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
