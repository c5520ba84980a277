//! Sends a session as HTTP requests. Each turn repeats the conversation with the real answers.

use std::time::Duration;

use sterna_random::mix;

use super::client::{ChatClient, ChatRequest, Disconnect};
use super::outcome::ChatOutcome;
use super::prompt_text::TextScale;
use crate::workload::{ChatTurn, Session};

/// What all conversations of a run have in common.
pub(super) struct ConversationSettings {
    /// How many words make a text of a given number of tokens.
    pub(super) scale: TextScale,
    /// Whether `max_tokens` is the answer's length in the workload. Used with `ignore_eos`.
    pub(super) exact_length: bool,
    /// API keys, indexed by tenant. Empty if the server has no tenants.
    pub(super) keys: Vec<String>,
}

/// Runs a session turn by turn until an answer is incomplete. Passes each outcome to `ended`.
pub(super) async fn run_session(
    client: &ChatClient,
    settings: &ConversationSettings,
    session: &Session,
    mut ended: impl FnMut(ChatOutcome),
) {
    let mut messages = Vec::new();
    if session.shared.tokens > 0 {
        messages.push(("system", settings.scale.text(session.shared)));
    }
    for (index, turn) in session.turns.iter().enumerate() {
        if index > 0 {
            tokio::time::sleep(Duration::from_secs_f64(turn.think)).await;
        }
        messages.push(("user", settings.scale.message(turn.prompt)));
        let request = settings.request(&messages, turn, session.tenant);
        let outcome = client.chat(&request).await;
        let text = match &outcome {
            ChatOutcome::Complete(answer) => Some(answer.text.clone()),
            _ => None,
        };
        ended(outcome);
        match text {
            Some(text) => messages.push(("assistant", text)),
            None => return,
        }
    }
}

impl ConversationSettings {
    fn request(
        &self,
        messages: &[(&'static str, String)],
        turn: &ChatTurn,
        tenant: u32,
    ) -> ChatRequest {
        let pieces = mix(turn.answer.seed) % u64::from(turn.answer.tokens);
        let disconnect = |after| Disconnect {
            after: Duration::from_secs_f64(after),
            pieces: pieces as u32,
        };
        ChatRequest {
            messages: messages.to_vec(),
            max_tokens: if self.exact_length {
                turn.answer.tokens
            } else {
                turn.max_tokens
            },
            // 52 bits stay exact on servers that parse numbers as doubles.
            sampling_seed: turn.answer.seed >> 12,
            disconnect: turn.disconnects_after.map(disconnect),
            key: self.keys.get(tenant as usize).cloned(),
        }
    }
}

/// Reads a file of `tenant=key` lines: the first line is the key of tenant 0, and so on.
pub(super) fn read_keys(path: &str) -> Result<Box<[String]>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let key = |(number, line): (usize, &str)| match line.split_once('=') {
        Some((_, key)) if !key.trim().is_empty() => Ok(key.trim().to_owned()),
        _ => Err(format!("line {} is not of the form tenant=key", number + 1)),
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
    fn a_request_has_the_length_of_its_answer_and_the_key_of_its_tenant() {
        let workload = named("liars").unwrap();
        let mut sessions = Trace::new(&workload, 1, 1.0).requests(100);
        let liar = sessions.find(|session| session.tenant == 0).unwrap();
        let mut settings = ConversationSettings {
            scale: TextScale {
                tokens_per_word: 1.0,
                template_tokens: 0,
            },
            exact_length: true,
            keys: vec!["a".into(), "b".into()],
        };
        let exact = settings.request(&[], &liar.turns[0], 1);
        assert_eq!((exact.max_tokens, exact.key.as_deref()), (20, Some("b")));
        settings.exact_length = false;
        settings.keys.clear();
        let open = settings.request(&[], &liar.turns[0], 1);
        assert_eq!((open.max_tokens, open.key), (2048, None));
    }
}
