//! Reads the events of one chat completion stream.
//!
//! Invariant: a stream counts as complete only if it has a finish reason, token usage and `[DONE]`.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::outcome::{CompleteAnswer, Failure, Timing, TokenUsage};

/// Collects the answer from the events of one stream.
#[derive(Default)]
pub(super) struct AnswerStream {
    text: String,
    pieces: u32,
    timing: Timing,
    last_text: Duration,
    finished: bool,
    usage: Option<TokenUsage>,
    done: bool,
}

/// The fields of a chat completion chunk that the load test needs.
#[derive(Deserialize)]
struct ChatChunk {
    #[serde(default)]
    choices: Vec<ChunkChoice>,
    usage: Option<TokenUsage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct ChunkChoice {
    #[serde(default)]
    delta: ChunkDelta,
    finish_reason: Option<String>,
}

#[derive(Default, Deserialize)]
struct ChunkDelta {
    content: Option<String>,
}

impl AnswerStream {
    /// Returns the number of pieces of text so far.
    pub(super) fn pieces(&self) -> u32 {
        self.pieces
    }

    /// Adds the data of one event that arrived at `now`, counted from the request's intended
    /// start.
    pub(super) fn event(&mut self, event: &str, now: Duration) -> Result<(), Failure> {
        if self.done {
            return Err(Failure::Protocol("an event after [DONE]".into()));
        }
        if event == "[DONE]" {
            self.done = true;
            self.timing.total = now;
            return Ok(());
        }
        let chunk: ChatChunk = serde_json::from_str(event)
            .map_err(|error| Failure::Protocol(format!("bad chunk: {error}")))?;
        if let Some(error) = chunk.error {
            return Err(Failure::InStream(code_of(&error)));
        }
        for choice in chunk.choices {
            if let Some(content) = choice.delta.content.filter(|content| !content.is_empty()) {
                self.piece(&content, now);
            }
            self.finished |= choice.finish_reason.is_some();
        }
        self.usage = chunk.usage.or(self.usage.take());
        Ok(())
    }

    fn piece(&mut self, content: &str, now: Duration) {
        match self.timing.first_text {
            None => self.timing.first_text = Some(now),
            Some(_) => self.timing.gaps.push(now - self.last_text),
        }
        self.last_text = now;
        self.pieces += 1;
        self.text.push_str(content);
    }

    /// Returns the answer once the body has ended.
    pub(super) fn end(self) -> Result<CompleteAnswer, Failure> {
        if !self.done {
            return Err(Failure::CutOff);
        }
        if !self.finished {
            return Err(Failure::Protocol("no finish_reason".into()));
        }
        let usage = self
            .usage
            .ok_or_else(|| Failure::Protocol("no usage".into()))?;
        Ok(CompleteAnswer {
            text: self.text,
            timing: self.timing,
            usage,
        })
    }
}

/// Returns the code of an error object, or its type or message if it has no code.
pub(super) fn code_of(error: &Value) -> String {
    let text = ["code", "type", "message"]
        .iter()
        .find_map(|key| error[key].as_str());
    text.map_or_else(|| error.to_string(), str::to_owned)
}
