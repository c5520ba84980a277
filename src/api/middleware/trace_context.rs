//! The W3C trace context of a request: the trace that its sender has begun.
//!
//! It follows <https://www.w3.org/TR/trace-context/>. The server sends no requests of its own, so
//! it reads `traceparent` only. `tracestate` matters to those who send requests on.

use axum::http::HeaderMap;

use crate::traces::TraceContext;

const TRACEPARENT: &str = "traceparent";
/// The bytes of `version-trace_id-parent_id-flags`.
const LENGTH: usize = 55;

/// In the flags of a context: the sender records the trace.
const SAMPLED: u8 = 1;

/// Returns the context in `headers`. Without exactly one valid header, this is `None`.
pub(super) fn read(headers: &HeaderMap) -> Option<TraceContext> {
    let mut given = headers.get_all(TRACEPARENT).iter();
    let value = given.next().filter(|_| given.next().is_none())?;
    parse(value.to_str().ok()?)
}

fn parse(text: &str) -> Option<TraceContext> {
    let (known, rest) = text.split_at_checked(LENGTH)?;
    let fields: Vec<&str> = known.split('-').collect();
    let &[version, trace_id, parent_id, flags] = fields.as_slice() else {
        return None;
    };
    let lengths = [version, trace_id, parent_id, flags].map(str::len);
    let is_hex = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let are_hex = known.bytes().all(|byte| byte == b'-' || is_hex(byte));
    let is_zero = |field: &str| field.bytes().all(|byte| byte == b'0');
    // A later version may append fields.
    let has_end = rest.is_empty() || version != "00" && rest.starts_with('-');
    let is_valid = lengths == [2, 32, 16, 2]
        && are_hex
        && version != "ff"
        && !is_zero(trace_id)
        && !is_zero(parent_id)
        && has_end;
    is_valid.then(|| TraceContext {
        trace_id: trace_id.to_owned(),
        parent_id: parent_id.to_owned(),
        is_sampled: u8::from_str_radix(flags, 16).is_ok_and(|flags| flags & SAMPLED != 0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const PARENT: &str = "00f067aa0ba902b7";

    #[test]
    fn valid_contexts_are_read() {
        for (text, is_sampled) in [
            (format!("00-{TRACE}-{PARENT}-01"), true),
            (format!("00-{TRACE}-{PARENT}-ff"), true),
            (format!("00-{TRACE}-{PARENT}-02"), false),
            (format!("cc-{TRACE}-{PARENT}-00"), false),
            (format!("cc-{TRACE}-{PARENT}-01-what-follows"), true),
        ] {
            let context = parse(&text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(context.trace_id, TRACE);
            assert_eq!(context.parent_id, PARENT);
            assert_eq!(context.is_sampled, is_sampled);
        }
    }

    #[test]
    fn malformed_contexts_are_ignored() {
        let zeros = "0".repeat(32);
        for text in [
            String::new(),
            format!("00-{TRACE}-{PARENT}"),
            format!("00-{TRACE}-{PARENT}-0"),
            format!("00-{TRACE}-{PARENT}-01-more"),
            format!("00-{TRACE}-{PARENT}-012"),
            format!("cc-{TRACE}-{PARENT}-01.more"),
            format!("ff-{TRACE}-{PARENT}-01"),
            format!("00-{zeros}-{PARENT}-01"),
            format!("00-{TRACE}-{}-01", &zeros[..16]),
            format!("00-{}-{PARENT}-01", TRACE.to_uppercase()),
            format!("00-{PARENT}-{TRACE}-01"),
            format!("0x-{TRACE}-{PARENT}-01"),
            format!("00-{}-{PARENT}-01", TRACE.replace('b', "-")),
            format!("é-{TRACE}-{PARENT}-01"),
        ] {
            assert_eq!(parse(&text), None, "{text}");
        }
    }

    #[test]
    fn several_contexts_are_none() {
        let one = format!("00-{TRACE}-{PARENT}-01");
        let mut headers = HeaderMap::new();
        headers.append(TRACEPARENT, one.parse().unwrap());
        assert!(read(&headers).is_some());
        headers.append(TRACEPARENT, one.parse().unwrap());
        assert_eq!(read(&headers), None);
    }
}
