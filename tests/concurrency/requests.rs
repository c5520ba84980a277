//! Random requests, and the parts of an answer that must be equal.

use serde_json::{Value, json};
use sterna_random::Random;

use crate::model::{FIRST_PIECE, VOCABULARY};

/// Returns `count` random tokens of text.
pub(crate) fn words(random: &mut Random, count: u64) -> Vec<u32> {
    let pieces = u64::from(VOCABULARY - FIRST_PIECE);
    let word = |_| FIRST_PIECE + random.below(pieces) as u32;
    (0..count).map(word).collect()
}

/// What two equal requests must have in common.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Said {
    pub(crate) text: String,
    pub(crate) tokens: Vec<Value>,
    pub(crate) finish_reason: Option<String>,
    /// Prompt tokens and completion tokens.
    pub(crate) usage: [Option<u64>; 2],
}

fn counts(usage: &Value) -> [Option<u64>; 2] {
    ["prompt_tokens", "completion_tokens"].map(|count| usage[count].as_u64())
}

fn finish_reason(choice: &Value) -> Option<String> {
    choice["finish_reason"].as_str().map(str::to_owned)
}

impl Said {
    /// Reads an answer that was not streamed.
    pub(crate) fn whole(answer: &Value) -> Said {
        let choice = &answer["choices"][0];
        Said {
            text: choice["text"].as_str().unwrap().to_owned(),
            tokens: choice["token_ids"].as_array().unwrap().clone(),
            finish_reason: finish_reason(choice),
            usage: counts(&answer["usage"]),
        }
    }

    /// Reads a stream with usage, which must end with `[DONE]`.
    pub(crate) fn streamed(body: &str) -> Said {
        let body = body
            .strip_suffix("data: [DONE]\n\n")
            .expect("the stream is complete");
        let mut said = Said {
            text: String::new(),
            tokens: Vec::new(),
            finish_reason: None,
            usage: [None; 2],
        };
        for event in events(body) {
            assert!(event.get("error").is_none(), "{event}");
            if let Some(choice) = event["choices"].get(0) {
                said.text += choice["text"].as_str().unwrap();
                said.tokens.extend(
                    choice["token_ids"]
                        .as_array()
                        .into_iter()
                        .flatten()
                        .cloned(),
                );
                if let Some(reason) = finish_reason(choice) {
                    assert_eq!(said.finish_reason, None, "a stream ends once");
                    said.finish_reason = Some(reason);
                }
            }
            if event["usage"].is_object() {
                said.usage = counts(&event["usage"]);
            }
        }
        said
    }
}

/// Returns the whole events of a stream that may be cut off.
pub(crate) fn events(body: &str) -> impl Iterator<Item = Value> {
    let whole = body.rfind("\n\n").map_or("", |end| &body[..end]);
    let frames = whole.split("\n\n");
    let data = frames.filter_map(|frame| frame.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]")
        .map(|data| serde_json::from_str(data).unwrap())
}

/// Returns `body` with the fields of `more`.
pub(crate) fn with(body: &Value, more: Value) -> Value {
    let mut body = body.clone();
    let Value::Object(more) = more else {
        panic!("fields are an object");
    };
    body.as_object_mut().unwrap().extend(more);
    body
}

/// Returns `body` as a request for a stream with usage.
pub(crate) fn streaming(body: &Value) -> Value {
    with(
        body,
        json!({"stream": true, "stream_options": {"include_usage": true}}),
    )
}
