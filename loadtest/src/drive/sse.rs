//! Parses a `text/event-stream` body into the data of its events, as the WHATWG standard defines.
//!
//! Invariant: the events do not depend on how the body was cut into reads.
//!
//! Invariant: an event counts only once its empty line has arrived.

/// A parser that collects bytes until they form events.
#[derive(Default)]
pub(crate) struct SseParser {
    bytes: Vec<u8>,
    consumed: usize, // The start of the first unread line in `bytes`.
    data: Option<String>,
    after_carriage_return: bool,
}

impl SseParser {
    /// Adds the bytes of one read.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.consumed);
        self.consumed = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the data of the next complete event. Several `data` lines are joined by line feeds.
    /// Comments, other fields and events without data are skipped.
    pub(crate) fn next_event(&mut self) -> Option<String> {
        while let Some(line) = self.next_line() {
            if line.is_empty() {
                if let Some(data) = self.data.take() {
                    return Some(data);
                }
                continue;
            }
            let (field, value) = line.split_once(':').unwrap_or((&line, ""));
            if field == "data" {
                let value = value.strip_prefix(' ').unwrap_or(value);
                match &mut self.data {
                    Some(data) => {
                        data.push('\n');
                        data.push_str(value);
                    }
                    None => self.data = Some(value.to_owned()),
                }
            }
        }
        None
    }

    /// Returns the next complete line. It ends with LF, CR or CR LF. A CR at the end of a read ends
    /// its line at once; a following LF belongs to the same line end.
    fn next_line(&mut self) -> Option<String> {
        if self.after_carriage_return && self.bytes.get(self.consumed) == Some(&b'\n') {
            self.consumed += 1;
        }
        let rest = &self.bytes[self.consumed..];
        if !rest.is_empty() {
            self.after_carriage_return = false;
        }
        let end = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r'))?;
        // Only whole lines are decoded, so a character split between two reads is complete here.
        let line = String::from_utf8_lossy(&rest[..end]).into_owned();
        self.after_carriage_return = rest[end] == b'\r';
        self.consumed += end + 1;
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(reads: &[&[u8]]) -> Vec<String> {
        let mut parser = SseParser::default();
        let mut events = Vec::new();
        for read in reads {
            parser.push(read);
            while let Some(event) = parser.next_event() {
                events.push(event);
            }
        }
        events
    }

    #[test]
    fn events_do_not_depend_on_how_the_body_is_cut() {
        let body = concat!(
            ": keep-alive\n\ndata: {\"a\":\"grüße 🐦\"}\r\n\r\n",
            "event: x\rid: 7\rdata:one\rdata: two\r\r\ndata: [DONE]\n\n"
        );
        let expected = vec![
            "{\"a\":\"grüße 🐦\"}".to_owned(),
            "one\ntwo".to_owned(),
            "[DONE]".to_owned(),
        ];
        let body = body.as_bytes();
        for first in 0..=body.len() {
            for second in first..=body.len() {
                assert_eq!(
                    events(&[&body[..first], &body[first..second], &body[second..]]),
                    expected,
                    "cut at {first} and {second}"
                );
            }
        }
        let bytes: Vec<&[u8]> = body.chunks(1).collect();
        assert_eq!(events(&bytes), expected);
    }

    #[test]
    fn an_event_without_its_empty_line_does_not_count() {
        assert_eq!(events(&[b"data: one\n\ndata: two\n"]), ["one"]);
    }

    #[test]
    fn comments_and_other_fields_are_skipped() {
        assert!(events(&[b": keep-alive\n\nretry: 10\n\nevent: ping\n\ndatum: no\n\n"]).is_empty());
    }

    #[test]
    fn an_empty_data_field_is_an_event() {
        assert_eq!(events(&[b"data\n\ndata:\ndata:\n\n"]), ["", "\n"]);
    }
}
