//! Reads the requests of a trace file.
//!
//! | Format | Known from | Fields |
//! |---|---|---|
//! | Azure LLM inference trace | CSV | `TIMESTAMP`, `ContextTokens`, `GeneratedTokens` |
//! | Mooncake | `input_length` | `timestamp` in ms, `input_length`, `output_length`, `hash_ids` |
//! | Sterna | `prompt_tokens` | `at` in s, `prompt_tokens`, `output_tokens`, `tenant` |
//!
//! The last two are JSON, one object a line. Mooncake's `hash_ids` name blocks of 512 tokens, each
//! with all tokens before it: prompts with equal ids have equal text.

use std::path::Path;

use chrono::{DateTime, NaiveDateTime};
use serde::Deserialize;
use sterna_random::mix;

use super::definition::{SessionClass, TenantRange, Workload};
use super::session::{ChatTurn, SeededText, Session};

/// The tokens of a block that a hash id of Mooncake names.
const BLOCK_TOKENS: u32 = 512;

/// The requests of a trace file, in the order of their start.
#[derive(Clone, Debug)]
pub(crate) struct RecordedTrace {
    sessions: Vec<Session>,
}

/// A line of a JSON trace.
#[derive(Deserialize)]
#[serde(untagged)]
enum JsonLine {
    Mooncake {
        timestamp: f64,
        input_length: u32,
        output_length: u32,
        #[serde(default)]
        hash_ids: Vec<u64>,
    },
    Sterna {
        at: f64,
        prompt_tokens: u32,
        output_tokens: u32,
        #[serde(default)]
        tenant: u32,
    },
}

/// A line of an Azure trace.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AzureLine {
    #[serde(rename = "TIMESTAMP")]
    timestamp: String,
    context_tokens: u32,
    generated_tokens: u32,
}

impl RecordedTrace {
    /// Reads `file`. Requests start `speed` times as fast as they did.
    ///
    /// # Errors
    /// If the file cannot be read, has no requests, or has a line that is not of its format.
    pub(crate) fn read(file: &Path, speed: f64) -> Result<RecordedTrace, String> {
        let text = std::fs::read_to_string(file).map_err(|error| error.to_string());
        let read = text.and_then(|text| RecordedTrace::parse(&text, speed));
        read.map_err(|error| format!("--trace {}: {error}", file.display()))
    }

    fn parse(text: &str, speed: f64) -> Result<RecordedTrace, String> {
        let mut sessions = if text.trim_start().starts_with('{') {
            json_lines(text)?
        } else {
            azure_lines(text)?
        };
        sessions.sort_by(|a, b| a.at.total_cmp(&b.at));
        let first = sessions.first().ok_or("the file has no requests")?.at;
        for session in &mut sessions {
            session.at = (session.at - first) / speed;
        }
        Ok(RecordedTrace { sessions })
    }

    /// Returns the sessions, each of which is one request.
    pub(crate) fn sessions(&self) -> &[Session] {
        &self.sessions
    }

    /// Returns the requests per second.
    pub(crate) fn rate(&self) -> f64 {
        let last = self.sessions.last().map_or(0.0, |session| session.at);
        self.sessions.len() as f64 / last.max(1e-3)
    }

    /// Returns the length of the longest request, prompt and answer together.
    pub(crate) fn longest(&self) -> u32 {
        let length = |session: &Session| session.prompt_len(0) + session.turns[0].max_tokens;
        self.sessions.iter().map(length).max().unwrap_or(0)
    }

    /// Returns the workload that the sessions belong to: one class, and the trace's tenants.
    pub(crate) fn workload(&self) -> Workload {
        let tenants = self.sessions.iter().map(|session| session.tenant + 1);
        Workload {
            name: "trace",
            description: "the requests of a trace file",
            load: 1.0,
            classes: vec![SessionClass {
                name: "trace",
                tenants: TenantRange {
                    first: 0,
                    count: tenants.max().unwrap_or(1),
                    zipf: 0.0,
                },
                ..SessionClass::default()
            }],
            weights: &[],
        }
    }
}

fn json_lines(text: &str) -> Result<Vec<Session>, String> {
    let lines = (1..).zip(text.lines());
    let session = |(number, line): (u64, &str)| {
        let parsed: JsonLine = serde_json::from_str(line)
            .map_err(|_| format!("line {number} is not a request of Mooncake or Sterna"))?;
        Ok(match parsed {
            JsonLine::Mooncake {
                timestamp,
                input_length,
                output_length,
                hash_ids,
            } => {
                let (shared, prompt) = blocks(&hash_ids, input_length, number);
                session(timestamp / 1e3, shared, prompt, output_length, (0, number))
            }
            JsonLine::Sterna {
                at,
                prompt_tokens,
                output_tokens,
                tenant,
            } => {
                let prompt = SeededText {
                    seed: mix(number),
                    tokens: prompt_tokens,
                };
                session(at, Vec::new(), prompt, output_tokens, (tenant, number))
            }
        })
    };
    lines
        .filter(|(_, line)| !line.trim().is_empty())
        .map(session)
        .collect()
}

/// Returns the texts of all blocks but the last one, and the text of the last one. It has what is
/// left of `tokens`.
fn blocks(hash_ids: &[u64], tokens: u32, number: u64) -> (Vec<SeededText>, SeededText) {
    let Some((last, before)) = hash_ids.split_last() else {
        let seed = mix(number);
        return (Vec::new(), SeededText { seed, tokens });
    };
    // Even, so that no block has the seed of a request without ids.
    let seed = |id: u64| mix(!id) & !1;
    let shared: Vec<SeededText> = before
        .iter()
        .map(|id| SeededText {
            seed: seed(*id),
            tokens: BLOCK_TOKENS,
        })
        .collect();
    let prompt = SeededText {
        seed: seed(*last),
        tokens: tokens
            .saturating_sub(BLOCK_TOKENS * shared.len() as u32)
            .max(1),
    };
    (shared, prompt)
}

fn azure_lines(text: &str) -> Result<Vec<Session>, String> {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let lines = (2..).zip(reader.deserialize::<AzureLine>());
    lines
        .map(|(number, line)| {
            let line = line.map_err(|error| error.to_string())?;
            let at = azure_seconds(&line.timestamp)
                .ok_or_else(|| format!("line {number}: no time: {}", line.timestamp))?;
            let prompt = SeededText {
                seed: mix(number),
                tokens: line.context_tokens,
            };
            Ok(session(
                at,
                Vec::new(),
                prompt,
                line.generated_tokens,
                (0, number),
            ))
        })
        .collect()
}

/// Parses a time such as `2023-11-16 18:15:46.6805900`. Later traces add `+00:00`.
fn azure_seconds(text: &str) -> Option<f64> {
    let with_zone = DateTime::parse_from_str(text, "%Y-%m-%d %H:%M:%S%.f%:z");
    let time = match with_zone {
        Ok(time) => time.naive_utc(),
        Err(_) => NaiveDateTime::parse_from_str(text, "%Y-%m-%d %H:%M:%S%.f").ok()?,
    };
    Some(time.and_utc().timestamp_micros() as f64 / 1e6)
}

/// Returns the session of one request. An answer has at least its stop token.
fn session(
    at: f64,
    shared: Vec<SeededText>,
    prompt: SeededText,
    output_tokens: u32,
    (tenant, number): (u32, u64),
) -> Session {
    let answer = SeededText {
        seed: mix(mix(number)),
        tokens: output_tokens.max(1),
    };
    Session {
        at,
        class: 0,
        tenant,
        shared,
        turns: vec![ChatTurn {
            think: 0.0,
            prompt,
            answer,
            max_tokens: answer.tokens,
            disconnects_after: None,
        }],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(text: &str, speed: f64) -> Vec<(f64, u32, u32)> {
        let trace = RecordedTrace::parse(text, speed).unwrap();
        let request = |session: &Session| {
            let turn = session.turns[0];
            (session.at, session.prompt_len(0), turn.answer.tokens)
        };
        trace.sessions().iter().map(request).collect()
    }

    #[test]
    fn azure_traces_are_read() {
        let old = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
                   2023-11-16 18:15:46.5000000,374,44\n2023-11-16 18:15:50.0000000,396,109\n";
        assert_eq!(requests(old, 2.0), [(0.0, 374, 44), (1.75, 396, 109)]);
        let new = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
                   2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.009930+00:00,9,0\n";
        assert_eq!(requests(new, 1.0), [(0.0, 2162, 5), (1.0, 9, 1)]);
    }

    #[test]
    fn mooncake_prompts_share_the_text_of_equal_blocks() {
        let text = concat!(
            r#"{"timestamp": 3000, "input_length": 1200, "output_length": 20, "#,
            r#""hash_ids": [4, 5, 6]}"#,
            "\n",
            r#"{"timestamp": 1000, "input_length": 1500, "output_length": 9, "#,
            r#""hash_ids": [4, 5, 7]}"#,
            "\n"
        );
        assert_eq!(requests(text, 1.0), [(0.0, 1500, 9), (2.0, 1200, 20)]);
        let trace = RecordedTrace::parse(text, 1.0).unwrap();
        let prompts: Vec<_> = trace.sessions().iter().map(|s| s.prompt(0)).collect();
        assert_eq!(prompts[0][..1024], prompts[1][..1024]);
        assert_ne!(prompts[0][1024], prompts[1][1024]);
        assert_eq!(trace.longest(), 1509);
    }

    #[test]
    fn own_traces_have_tenants() {
        let text = concat!(
            r#"{"at": 0.5, "prompt_tokens": 40, "output_tokens": 80}"#,
            "\n\n",
            r#"{"at": 0.75, "prompt_tokens": 30, "output_tokens": 8, "tenant": 2}"#,
        );
        assert_eq!(requests(text, 0.5), [(0.0, 40, 80), (0.5, 30, 8)]);
        assert_eq!(
            RecordedTrace::parse(text, 1.0)
                .unwrap()
                .workload()
                .tenants(),
            3
        );
    }

    #[test]
    fn other_lines_are_errors_that_name_the_line() {
        let error = |text: &str| RecordedTrace::parse(text, 1.0).unwrap_err();
        assert!(error("{\"at\": 1}\n").contains("line 1"));
        let csv = "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n";
        assert!(error(csv).contains("line 2"));
        assert!(error("").contains("no requests"));
    }
}
