//! Finds requests whose head has both a `content-length` and a `transfer-encoding`.
//!
//! If a proxy believed one and the server the other, a client could smuggle a request past the
//! proxy. RFC 9112 (6.1) lets a server reject such a request, and this server does. The HTTP
//! library removes the length before any handler sees the head, so this file reads the connection's
//! input beside it, with the library's own parser.

use httparse::{EMPTY_HEADER, Request, Status};

/// The HTTP library rejects a head with more fields.
const MAX_FIELDS: usize = 100;

/// The scan of one connection's input.
#[derive(Default)]
pub(super) struct HeadScan {
    part: ScanPart,
    beginning: Vec<u8>, // Of a head that has arrived in part.
    heads: u64,
}

/// What the next byte belongs to.
#[derive(Clone, Copy, Default)]
enum ScanPart {
    #[default]
    Head,
    /// A body of which this many bytes are missing.
    Sized(u64),
    /// A body in chunks. The HTTP library says when it has ended. A request that follows in the
    /// same packet is not scanned, so it is rejected.
    Chunked,
    /// The connection ends with the latest request.
    Last,
}

impl HeadScan {
    /// Returns the number of heads that were scanned.
    pub(super) fn heads(&self) -> u64 {
        self.heads
    }

    /// Returns whether a part of a head has arrived.
    pub(super) fn is_in_head(&self) -> bool {
        !self.beginning.is_empty()
    }

    /// Scans the next bytes of the input. `in_body` says that a body has not ended. Returns the
    /// number of the request, counted from 1, whose head has both fields.
    pub(super) fn scan(&mut self, mut bytes: &[u8], in_body: bool) -> Option<u64> {
        if matches!(self.part, ScanPart::Chunked) && !in_body {
            self.part = ScanPart::Head;
        }
        loop {
            match self.part {
                ScanPart::Head if bytes.is_empty() => return None,
                ScanPart::Head => {
                    let count = self.scan_head(bytes)?;
                    bytes = &bytes[count..];
                    if matches!(self.part, ScanPart::Last) {
                        return Some(self.heads);
                    }
                }
                ScanPart::Sized(missing) => {
                    let count = missing.min(bytes.len() as u64);
                    bytes = &bytes[count as usize..];
                    if count < missing {
                        self.part = ScanPart::Sized(missing - count);
                        return None;
                    }
                    self.part = ScanPart::Head;
                }
                ScanPart::Chunked | ScanPart::Last => return None,
            }
        }
    }

    /// Scans a head and decides what follows it. Returns how many of `bytes` belong to it, or
    /// `None` if it is incomplete or not HTTP.
    fn scan_head(&mut self, bytes: &[u8]) -> Option<usize> {
        let earlier = self.beginning.len();
        self.beginning.extend_from_slice(bytes);
        let mut fields = [EMPTY_HEADER; MAX_FIELDS];
        let mut request = Request::new(&mut fields);
        let status = request.parse(&self.beginning);
        let (part, length) = match status {
            Ok(Status::Complete(length)) => (after(&request), length),
            Ok(Status::Partial) => return None,
            Err(_) => {
                // The HTTP library rejects it too and closes the connection.
                self.beginning = Vec::new();
                self.part = ScanPart::Last;
                return None;
            }
        };
        self.beginning = Vec::new();
        self.heads += 1;
        self.part = part;
        Some(length - earlier)
    }
}

/// Returns what follows a head.
fn after(request: &Request<'_, '_>) -> ScanPart {
    let values = |name: &'static str| {
        let fields = request.headers.iter();
        fields.filter(move |field| field.name.eq_ignore_ascii_case(name))
    };
    let length = values("content-length").next();
    let is_encoded = values("transfer-encoding").next().is_some();
    match length {
        Some(_) if is_encoded => ScanPart::Last,
        None if is_encoded => ScanPart::Chunked,
        None => ScanPart::Head,
        Some(length) => {
            let digits = str::from_utf8(length.value).unwrap_or_default();
            // The HTTP library rejects a length that is not a number.
            ScanPart::Sized(digits.trim().parse().unwrap_or(u64::MAX))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &str = "POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n";
    const BOTH_REVERSED: &str =
        "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\nhost: x\r\ncontent-length: 5\r\n\r\n";
    const SIZED: &str = "POST / HTTP/1.1\r\ncontent-length: 5\r\n\r\n12\r\n\r";
    const CHUNKED: &str = "POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n";
    const PLAIN: &str = "\r\nGET / HTTP/1.1\r\n\r\n";

    /// Scans `input` in pieces of `size` bytes.
    fn scan(input: &str, size: usize) -> Option<u64> {
        let mut scan = HeadScan::default();
        let mut pieces = input.as_bytes().chunks(size);
        pieces.find_map(|piece| scan.scan(piece, false))
    }

    #[test]
    fn a_head_with_two_lengths_is_found_however_it_arrives() {
        for (input, expected) in [
            (BOTH.to_owned(), Some(1)),
            (BOTH_REVERSED.to_owned(), Some(1)),
            (PLAIN.to_owned() + SIZED + PLAIN + BOTH, Some(4)),
            (SIZED.to_owned() + PLAIN + SIZED + PLAIN, None),
            (
                "GET / HTTP/1.1\r\nx: transfer-encoding\r\n".to_owned(),
                None,
            ),
            ("no HTTP\r\n\r\n".to_owned() + BOTH, None),
        ] {
            for size in 1..=input.len() {
                assert_eq!(
                    scan(&input, size),
                    expected,
                    "{input:?} in pieces of {size}"
                );
            }
        }
    }

    #[test]
    fn a_head_behind_chunks_is_found_when_they_have_ended() {
        let mut scan = HeadScan::default();
        assert_eq!(scan.scan(CHUNKED.as_bytes(), false), None);
        assert_eq!(scan.scan(BOTH.as_bytes(), true), None, "these are chunks");
        assert_eq!(scan.scan(BOTH.as_bytes(), false), Some(2));
    }
}
