//! A session as HTTP requests: each turn sends the conversation so far, with the answers that truly came.

use std::path::Path;
use std::time::Duration;

use super::client::{Client, End, Outcome};
use super::text::Scale;
use crate::workload::{Session, Turn, mix};

/// One request, ready to be sent.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PlannedRequest {
    /// Roles and texts, the user's new message last.
    pub(super) messages: Vec<(&'static str, String)>,
    /// Output tokens at most.
    pub(super) max_tokens: u32,
    /// Seed of the server's sampler.
    pub(super) sampling_seed: u64,
    /// When its client walks away, if it does.
    pub(super) disconnect: Option<Disconnect>,
    /// The tenant's API key.
    pub(super) key: Option<String>,
}

/// The client drops the connection at whichever comes first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Disconnect {
    /// This long after sending.
    pub(super) after: Duration,
    /// Having read this many pieces of text.
    pub(super) pieces: u32,
}

/// What all conversations of a run have in common.
pub(super) struct Speech {
    /// How long texts are.
    pub(super) scale: Scale,
    /// Ask for as many tokens as the answer is to have, for servers that then go on to the last one.
    pub(super) exact: bool,
    /// By tenant; empty for a server without keys.
    pub(super) keys: Vec<String>,
}

/// Holds the whole session, turn after turn, as long as whole answers come. Each outcome goes to `ended`.
pub(super) async fn converse(
    client: &Client,
    speech: &Speech,
    session: &Session,
    mut ended: impl FnMut(Outcome),
) {
    let mut messages = Vec::new();
    if session.shared.tokens > 0 {
        messages.push(("system", speech.scale.text(session.shared)));
    }
    for (place, turn) in session.turns.iter().enumerate() {
        if place > 0 {
            tokio::time::sleep(Duration::from_secs_f64(turn.think)).await;
        }
        messages.push(("user", speech.scale.message(turn.prompt)));
        let request = speech.request(&messages, turn, session.tenant);
        let outcome = client.chat(&request).await;
        let is_complete = matches!(outcome.end, End::Complete(_));
        messages.push(("assistant", outcome.answer.clone()));
        ended(outcome);
        if !is_complete {
            return;
        }
    }
}

impl Speech {
    /// A tenant's key.
    pub(super) fn key(&self, tenant: u32) -> Option<String> {
        self.keys.get(tenant as usize).cloned()
    }

    fn request(
        &self,
        messages: &[(&'static str, String)],
        turn: &Turn,
        tenant: u32,
    ) -> PlannedRequest {
        let pieces = mix(turn.answer.seed) % u64::from(turn.answer.tokens);
        let disconnect = |after| Disconnect {
            after: Duration::from_secs_f64(after),
            pieces: pieces as u32,
        };
        PlannedRequest {
            messages: messages.to_vec(),
            max_tokens: if self.exact {
                turn.answer.tokens
            } else {
                turn.max_tokens
            },
            sampling_seed: turn.answer.seed >> 12, // Exact also for servers that read numbers as doubles.
            disconnect: turn.leaves.map(disconnect),
            key: self.key(tenant),
        }
    }
}

/// Reads `tenant=key` lines: the first line is for tenant 0 of the workload, the second for tenant 1, and so on.
pub(super) fn read_keys(path: &Path) -> Result<Vec<String>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let key = |(number, line): (usize, &str)| match line.split_once('=') {
        Some((_, key)) if !key.trim().is_empty() => Ok(key.trim().to_owned()),
        _ => Err(format!("line {}: not tenant=key", number + 1)),
    };
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| !line.trim().is_empty())
        .map(key)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Trace, named};

    #[test]
    fn answers_are_as_long_as_asked_and_tenants_have_their_keys() {
        let workload = named("liars").unwrap();
        let mut sessions = Trace::new(&workload, 1, 1.0, 100, f64::INFINITY);
        let liar = sessions.find(|session| session.tenant == 0).unwrap();
        let mut speech = Speech {
            scale: Scale {
                tokens_per_word: 1.0,
                marks: 0,
            },
            exact: true,
            keys: vec!["a".into(), "b".into()],
        };
        let exact = speech.request(&[], &liar.turns[0], 1);
        assert_eq!((exact.max_tokens, exact.key.as_deref()), (20, Some("b")));
        speech.exact = false;
        speech.keys.clear();
        let open = speech.request(&[], &liar.turns[0], 1);
        assert_eq!((open.max_tokens, open.key), (2048, None));
    }
}
