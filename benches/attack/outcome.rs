//! How a request ended, and whether it may end so.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::client::Connection;

/// The end of one request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// The answer is whole: it has its finish reason, and a stream has its one `[DONE]`.
    Complete,
    /// 429 or 503 with Retry-After.
    Refused,
    /// A 4xx that the request deserves.
    Invalid,
    /// One error event in the stream, or a 5xx while the server ends.
    Failed(String),
    /// The client left.
    Left,
    /// The connection was refused, or closed before the answer began.
    Unreachable,
    /// Anything else. The promise excludes it.
    Broken(String),
}

/// What a request took.
#[derive(Clone, Debug)]
pub(crate) struct Served {
    pub(crate) outcome: Outcome,
    /// From sending to the first token of the answer, or to the head of a refusal.
    pub(crate) first: Duration,
    /// The longest time between two pieces of the answer.
    pub(crate) longest_gap: Duration,
    pub(crate) tokens: u64,
    pub(crate) closes: bool,
}

impl Served {
    pub(crate) fn unreachable() -> Served {
        Served {
            outcome: Outcome::Unreachable,
            first: Duration::ZERO,
            longest_gap: Duration::ZERO,
            tokens: 0,
            closes: true,
        }
    }
}

/// Sends a request and reads its answer. With `leave_after`, the client leaves after that number of
/// pieces of the body.
pub(crate) async fn serve(
    connection: &mut Connection,
    (path, key, body): (&str, &str, &str),
    leave_after: Option<usize>,
) -> Served {
    let start = Instant::now();
    let mut served = Served::unreachable();
    let read = read(
        connection,
        (path, key, body),
        leave_after,
        start,
        &mut served,
    );
    served.outcome = match read.await {
        Ok(outcome) => outcome,
        Err(_) if served.first == Duration::ZERO => Outcome::Unreachable,
        Err(error) => Outcome::Broken(format!("the answer is cut: {}", error.kind())),
    };
    served
}

async fn read(
    connection: &mut Connection,
    (path, key, body): (&str, &str, &str),
    leave_after: Option<usize>,
    start: Instant,
    served: &mut Served,
) -> io::Result<Outcome> {
    connection.post(path, key, body).await?;
    if leave_after == Some(0) {
        return Ok(Outcome::Left);
    }
    let head = connection.head().await?;
    served.first = start.elapsed();
    let (mut text, mut last, mut pieces) = (Vec::new(), Instant::now(), 0);
    while let Some(piece) = connection.piece().await? {
        let now = Instant::now();
        if pieces == 1 {
            // The first event has the role, the second the first text.
            served.first = now - start;
        } else {
            served.longest_gap = served.longest_gap.max(now - last);
        }
        (last, pieces) = (now, pieces + 1);
        text.extend(piece);
        if leave_after == Some(pieces) {
            return Ok(Outcome::Left);
        }
    }
    served.closes = head.closes;
    let text = String::from_utf8_lossy(&text);
    served.tokens = completion_tokens(&text);
    Ok(classify(head.status, head.retry_after, &text))
}

fn completion_tokens(text: &str) -> u64 {
    let field = "\"completion_tokens\":";
    let digits = text.rfind(field).map(|at| &text[at + field.len()..]);
    let end = |digits: &str| digits.find(|c: char| !c.is_ascii_digit());
    digits
        .and_then(|digits| digits[..end(digits)?].parse().ok())
        .unwrap_or(0)
}

fn classify(status: u16, retry_after: bool, text: &str) -> Outcome {
    let broken = |what: &str| Outcome::Broken(format!("{status}, {what}: {}", excerpt(text)));
    if status == 200 && text.starts_with("data: ") {
        let ends = text.matches("data: [DONE]").count();
        // One for each choice.
        let finishes = text.matches("\"finish_reason\":\"").count();
        let errors = text.matches("data: {\"error\"").count();
        return match (ends, finishes, errors) {
            (1, 1.., 0) if text.ends_with("data: [DONE]\n\n") => Outcome::Complete,
            (_, _, 1) => Outcome::Failed("an error event".into()),
            _ => broken("not one end"),
        };
    }
    let Ok(body) = serde_json::from_str::<Value>(text) else {
        return broken("no JSON");
    };
    match status {
        200 if body["choices"][0]["finish_reason"].is_string() => Outcome::Complete,
        429 | 503 if retry_after && body["error"]["code"].is_string() => Outcome::Refused,
        400..=499 if body["error"]["code"].is_string() => Outcome::Invalid,
        503 | 504 if body["error"]["code"].is_string() => Outcome::Failed(format!("{status}")),
        _ => broken("unexpected"),
    }
}

fn excerpt(text: &str) -> String {
    let tail = text.len().saturating_sub(160);
    let tail = (tail..=text.len()).find(|&at| text.is_char_boundary(at));
    text[tail.unwrap_or(0)..].to_owned()
}

/// How many requests ended in each way.
#[derive(Debug, Default)]
pub(crate) struct Tally(pub(crate) BTreeMap<Outcome, u64>);

impl Tally {
    pub(crate) fn count(&mut self, outcome: Outcome) {
        *self.0.entry(outcome).or_default() += 1;
    }

    pub(crate) fn merge(&mut self, other: Tally) {
        for (outcome, count) in other.0 {
            *self.0.entry(outcome).or_default() += count;
        }
    }

    pub(crate) fn of(&self, outcome: &Outcome) -> u64 {
        self.0.get(outcome).copied().unwrap_or(0)
    }

    pub(crate) fn total(&self) -> u64 {
        self.0.values().sum()
    }

    /// Returns the number of ends that the promise excludes, and prints them.
    pub(crate) fn broken(&self) -> u64 {
        let broken = self
            .0
            .iter()
            .filter(|(outcome, _)| matches!(outcome, Outcome::Broken(_)));
        broken
            .inspect(|(outcome, count)| println!("  {count} × {outcome:?}"))
            .map(|(_, count)| count)
            .sum()
    }
}
