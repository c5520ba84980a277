//! The requests of a run as CSV: one line each, in the order in which they ended.

use std::path::Path;

use serde::Serialize;

use crate::drive::record::{RequestEnd, RequestRecord, RunRecord};

/// A line of the file. The names are the columns. What a request does not have is empty.
#[derive(Serialize)]
struct RequestLine<'a> {
    request: u64,
    session: u64,
    turn: usize,
    class: &'a str,
    tenant: u32,
    slow: bool,
    start_seconds: f64,
    late_seconds: f64,
    end_seconds: f64,
    outcome: &'a str,
    failure: Option<String>,
    first_token_seconds: Option<f64>,
    per_output_token_seconds: Option<f64>,
    end_to_end_seconds: Option<f64>,
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    output_tokens: Option<u64>,
}

/// Writes the requests of `record` to `file`.
pub(crate) fn write_csv(record: &RunRecord, file: &Path) -> csv::Result<()> {
    let mut writer = csv::Writer::from_path(file)?;
    for request in &record.requests {
        writer.serialize(line(request))?;
    }
    Ok(writer.flush()?)
}

fn line(request: &RequestRecord) -> RequestLine<'_> {
    let identity = &request.identity;
    let (outcome, failure) = match &request.end {
        RequestEnd::Complete(_) => ("complete", None),
        RequestEnd::Left => ("left", None),
        RequestEnd::Failed(failure) => ("failed", Some(failure.to_string())),
    };
    let answer = request.answer();
    RequestLine {
        request: identity.number,
        session: identity.session,
        turn: identity.turn,
        class: identity.class,
        tenant: identity.tenant,
        slow: identity.is_slow,
        start_seconds: request.start_seconds,
        late_seconds: request.late_seconds,
        end_seconds: request.end_seconds,
        outcome,
        failure,
        first_token_seconds: answer.and_then(|answer| answer.first_token_seconds),
        per_output_token_seconds: answer.and_then(|answer| answer.per_output_token_seconds),
        end_to_end_seconds: answer.map(|answer| answer.end_to_end_seconds),
        prompt_tokens: answer.map(|answer| answer.prompt_tokens),
        cached_tokens: answer.map(|answer| answer.cached_tokens),
        output_tokens: answer.map(|answer| answer.output_tokens),
    }
}
