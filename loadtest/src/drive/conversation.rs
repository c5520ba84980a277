//! A session as chat requests. Each turn repeats the conversation with the real answers.

use sterna_random::mix;

use super::client::{ChatRequest, Disconnect};
use super::keys::TenantKey;
use super::prompt_text::TextScale;
use crate::workload::{ChatTurn, Session};
use std::time::Duration;

/// Separates the choice of slow clients from other choices that follow from the same seed.
const SLOW_STREAM: u64 = 0x5103;

/// What all conversations of a run have in common.
pub(super) struct ConversationSettings {
    /// How many words make a text of a given number of tokens.
    pub(super) scale: TextScale,
    /// Whether `max_tokens` is the answer's length in the workload. Used with `ignore_eos`.
    pub(super) exact_length: bool,
    /// The share of requests whose client reads slowly.
    pub(super) slow_fraction: f64,
    /// Names and API keys, indexed by tenant. Empty if the server has no tenants.
    pub(super) keys: Vec<TenantKey>,
}

/// A session and the messages so far.
pub(super) struct ChatHistory<'a> {
    settings: &'a ConversationSettings,
    session: &'a Session,
    messages: Vec<(&'static str, String)>,
}

impl<'a> ChatHistory<'a> {
    /// Starts `session`, with its system message if it has one.
    pub(super) fn new(settings: &'a ConversationSettings, session: &'a Session) -> Self {
        let mut messages = Vec::new();
        if session.shared_tokens() > 0 {
            let texts = session.shared.iter();
            let texts: Vec<String> = texts.map(|text| settings.scale.text(*text)).collect();
            messages.push(("system", texts.join(" ")));
        }
        ChatHistory {
            settings,
            session,
            messages,
        }
    }

    /// Adds the user's message of `turn` and returns the request.
    pub(super) fn request(&mut self, turn: &ChatTurn) -> ChatRequest {
        let text = self.settings.scale.message(turn.prompt);
        self.messages.push(("user", text));
        let tenant = self.session.tenant;
        self.settings.request(&self.messages, turn, tenant)
    }

    /// Adds the server's answer.
    pub(super) fn answered(&mut self, text: String) {
        self.messages.push(("assistant", text));
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
        let slow_draw = mix(turn.answer.seed ^ SLOW_STREAM) >> 11;
        let slow_draw = slow_draw as f64 / (1u64 << 53) as f64;
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
            is_slow: slow_draw < self.slow_fraction,
            key: self
                .keys
                .get(tenant as usize)
                .map(|entry| entry.key.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Trace, named};

    fn settings(slow_fraction: f64) -> ConversationSettings {
        let key = |name: &str| TenantKey {
            name: name.into(),
            key: name.into(),
        };
        ConversationSettings {
            scale: TextScale {
                tokens_per_word: 1.0,
                template_tokens: 0,
            },
            exact_length: true,
            slow_fraction,
            keys: vec![key("a"), key("b")],
        }
    }

    #[test]
    fn a_request_has_the_length_of_its_answer_and_the_key_of_its_tenant() {
        let workload = named("liars").unwrap();
        let mut sessions = Trace::new(&workload, 1, 1.0).requests(100);
        let liar = sessions.find(|session| session.tenant == 0).unwrap();
        let mut settings = settings(0.0);
        let exact = settings.request(&[], &liar.turns[0], 1);
        assert_eq!((exact.max_tokens, exact.key.as_deref()), (20, Some("b")));
        assert!(!exact.is_slow);
        settings.exact_length = false;
        settings.keys.clear();
        let open = settings.request(&[], &liar.turns[0], 1);
        assert_eq!((open.max_tokens, open.key), (2048, None));
    }

    #[test]
    fn slow_clients_have_their_share() {
        let workload = named("questions").unwrap();
        let sessions: Vec<_> = Trace::new(&workload, 1, 1.0).requests(2000).collect();
        let slow = |settings: ConversationSettings| {
            let is_slow = |session: &&Session| settings.request(&[], &session.turns[0], 0).is_slow;
            sessions.iter().filter(is_slow).count()
        };
        assert_eq!(slow(settings(0.0)), 0);
        assert!((540..660).contains(&slow(settings(0.3))));
        assert_eq!(slow(settings(1.0)), 2000);
    }
}
