//! Takes the reasoning out of earlier messages of the assistant, as chat templates do.
//!
//! Many templates look for `</think>` in the content of such a message and write only what follows.
//! A text in which placeholders hide the tag looks different to them. So the server splits the
//! content itself, in each way that a template is known to do it. It uses a way only if the prompt
//! is then the text that the template writes without placeholders. So tags that the template writes
//! around the reasoning are control tokens, and tags that it copies from a message are text.

use super::Message;

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// How a template takes the reasoning out of a content.
#[derive(Clone, Copy)]
struct EarlierReasoning {
    /// Whether the content begins behind the last closing tag, instead of the first.
    at_last: bool,
    /// Whether the template reads the reasoning, which the first closing tag ends.
    keeps_reasoning: bool,
    /// Whether the content begins behind the line breaks after the tag.
    strips: bool,
}

/// Returns the conversation in each way of splitting it. There is none if no message has a tag.
pub(super) fn splits(messages: &[Message]) -> impl Iterator<Item = Vec<Message>> {
    let has_tag = messages
        .iter()
        .any(|message| tagged_content(message).is_some());
    let ways = [true, false].into_iter().flat_map(|at_last| {
        let both = [(true, true), (false, false), (false, true), (true, false)];
        both.map(|(keeps_reasoning, strips)| EarlierReasoning {
            at_last,
            keeps_reasoning,
            strips,
        })
    });
    ways.filter(move |_| has_tag).map(|way| {
        let messages = messages.iter();
        messages.map(|message| way.split(message)).collect()
    })
}

/// Returns the content of a message of the assistant that has a closing tag.
fn tagged_content(message: &Message) -> Option<&str> {
    let content = Some(message.content.as_str()).filter(|content| content.contains(CLOSE));
    content.filter(|_| message.role == "assistant")
}

impl EarlierReasoning {
    fn split(self, message: &Message) -> Message {
        let parts = tagged_content(message).and_then(|content| content.split_once(CLOSE));
        let Some((before, after)) = parts else {
            return message.clone();
        };
        let after = match after.rsplit_once(CLOSE) {
            Some((_, rest)) if self.at_last => rest,
            _ => after,
        };
        let reasoning = before.rsplit(OPEN).next().unwrap_or(before);
        let content = match self.strips {
            true => after.trim_start_matches('\n'),
            false => after,
        };
        let own = message.reasoning.clone();
        Message {
            content: content.to_owned(),
            reasoning: own.or_else(|| self.keeps_reasoning.then(|| reasoning.to_owned())),
            ..message.clone()
        }
    }
}
