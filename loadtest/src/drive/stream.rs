//! Reads the events of one chat completion stream.
//!
//! Invariant: a stream counts as complete only if it has a finish reason, token usage and `[DONE]`.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::outcome::{CompleteAnswer, Failure, Timing, TokenUsage};

/// Pieces of text that follow each other faster come from one step of the server. No step is as
/// fast: it reads all weights of the model.
const TOGETHER: Duration = Duration::from_micros(100);

/// Collects the answer from the events of one stream.
#[derive(Default)]
pub(super) struct AnswerStream {
    text: String,
    pieces: u32,
    timing: Timing,
    tokens: u64, // As the usage so far says, or one for each piece.
    last_text: Duration,
    step: ArrivedStep,
    finished: bool,
    usage: Option<TokenUsage>,
    done: bool,
}

/// The tokens that a step of the server brought, which arrive together.
#[derive(Default)]
struct ArrivedStep {
    before: Duration, // When the text before them arrived.
    first_gap: usize, // The index of their first gap.
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
    reasoning_content: Option<String>,
    reasoning: Option<String>, // The newer name, which some servers send alone.
}

impl ChunkDelta {
    /// Returns the text of the answer in this event, and `None` if the event has no text at all.
    /// What a model thinks takes time and tokens, but a session does not repeat it.
    fn text(self) -> Option<String> {
        let thought = self.reasoning_content.or(self.reasoning);
        let content = self.content.unwrap_or_default();
        let has_text = !content.is_empty() || thought.is_some_and(|text| !text.is_empty());
        has_text.then_some(content)
    }
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
        let counted = chunk.usage.as_ref().map(|usage| usage.completion_tokens);
        for choice in chunk.choices {
            if let Some(content) = choice.delta.text() {
                let known = counted.unwrap_or(self.tokens + 1);
                let tokens = known.saturating_sub(self.tokens).max(1);
                self.tokens = known.max(self.tokens);
                self.piece(&content, tokens as usize, now);
            }
            self.finished |= choice.finish_reason.is_some();
        }
        self.usage = chunk.usage.or(self.usage.take());
        Ok(())
    }

    /// Adds a piece of text with this many tokens.
    fn piece(&mut self, content: &str, tokens: usize, now: Duration) {
        let gaps = &mut self.timing.gaps;
        let is_first = self.timing.first_text.is_none();
        let before = *self.timing.first_text.get_or_insert(now);
        if is_first {
            self.step.before = before;
        } else if now - self.last_text >= TOGETHER {
            self.step = ArrivedStep {
                before: self.last_text,
                first_gap: gaps.len(),
            };
        }
        // The first token of an answer has no gap before it.
        let of_step = gaps.len() - self.step.first_gap + tokens - usize::from(is_first);
        gaps.truncate(self.step.first_gap);
        if of_step > 0 {
            let gap = (now - self.step.before).div_f64(of_step as f64);
            gaps.extend(std::iter::repeat_n(gap, of_step));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the gaps, in microseconds, of pieces that arrive at these moments, in microseconds,
    /// with these tokens so far. A server that tells no tokens has 0.
    fn gaps(pieces: &[(u64, u64)]) -> Vec<u128> {
        let mut stream = AnswerStream::default();
        for (at, tokens) in pieces {
            let usage = match tokens {
                0 => String::new(),
                _ => format!(r#","usage":{{"prompt_tokens":1,"completion_tokens":{tokens}}}"#),
            };
            let chunk = format!(r#"{{"choices":[{{"delta":{{"content":"a"}}}}]{usage}}}"#);
            stream.event(&chunk, Duration::from_micros(*at)).unwrap();
        }
        stream.timing.gaps.iter().map(Duration::as_micros).collect()
    }

    #[test]
    fn several_tokens_in_one_event_share_its_time() {
        assert_eq!(
            gaps(&[(5000, 1), (9000, 3), (10_000, 4)]),
            [2000, 2000, 1000]
        );
        assert_eq!(gaps(&[(5000, 2), (9000, 3)]), [0, 4000]);
    }

    #[test]
    fn events_that_arrive_together_share_their_time() {
        assert_eq!(
            gaps(&[(5000, 0), (9000, 0), (9005, 0), (9010, 0)]),
            [1336; 3]
        );
        assert_eq!(gaps(&[(5000, 0), (5004, 0), (8004, 0)]), [4, 3000]);
        assert_eq!(gaps(&[(5000, 1), (9000, 2), (9050, 4)]), [1350; 3]);
    }

    #[test]
    fn thoughts_take_time_and_are_no_part_of_the_answer() {
        let mut stream = AnswerStream::default();
        let deltas = [
            r#"{"role":"assistant","content":""}"#,
            r#"{"reasoning_content":"a","reasoning":"a"}"#,
            r#"{"reasoning":"b"}"#,
            r#"{"content":"c"}"#,
        ];
        for (at, delta) in deltas.iter().enumerate() {
            let chunk = format!(r#"{{"choices":[{{"delta":{delta}}}]}}"#);
            let now = Duration::from_millis(at as u64);
            stream.event(&chunk, now).unwrap();
        }
        let ms = Duration::from_millis;
        assert_eq!(stream.timing.first_text, Some(ms(1)));
        assert_eq!(stream.timing.gaps, [ms(1), ms(1)]);
        assert_eq!((stream.pieces(), stream.text.as_str()), (3, "c"));
    }

    #[test]
    fn a_server_that_tells_no_tokens_has_one_in_each_event() {
        assert_eq!(gaps(&[(5000, 0), (6000, 0), (8000, 0)]), [1000, 2000]);
    }
}
