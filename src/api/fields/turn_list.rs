//! The messages of a conversation in which instructions may stand anywhere, as the chat template
//! can write them.
//!
//! Agents put instructions between other messages, and many templates have a place for them only at
//! the beginning. There, the text stands in the user's message, between tags that models know from
//! Anthropic's clients.

use crate::text::{ChatTemplate, Message};
use crate::tools::Turn;

/// What stands between two texts of one message.
pub(in crate::api) const BETWEEN: &str = "\n\n";

const SYSTEM: &str = "system";
const USER: &str = "user";

/// The messages of a conversation.
pub(in crate::api) struct TurnList {
    system: String, // The instructions before all other messages.
    turns: Vec<Turn>,
    has_system_turns: bool,
    joins_users: bool,
}

impl TurnList {
    /// Begins with `system`. Messages of the user that follow each other are one message if
    /// `joins_users` says so, or if the template refuses them.
    pub(in crate::api) fn new(
        system: String,
        template: Option<&ChatTemplate>,
        joins_users: bool,
    ) -> TurnList {
        TurnList {
            system,
            turns: Vec::new(),
            has_system_turns: template.is_some_and(ChatTemplate::has_system_turns),
            joins_users: joins_users
                || template.is_some_and(|template| !template.has_user_turns_in_a_row()),
        }
    }

    /// Adds instructions. They join the first ones if nothing else stands before.
    pub(in crate::api) fn instruct(&mut self, text: String) {
        if self.turns.is_empty() {
            join(&mut self.system, &text);
        } else if self.has_system_turns {
            self.turns.push(said(SYSTEM, text));
        } else {
            let reminder = format!("<system-reminder>\n{text}\n</system-reminder>");
            self.user_adds(reminder, true);
        }
    }

    /// Adds a message of the user.
    pub(in crate::api) fn user_says(&mut self, text: String) {
        self.user_adds(text, self.joins_users);
    }

    fn user_adds(&mut self, text: String, joins: bool) {
        match self.turns.last_mut() {
            Some(Turn::Said(last)) if joins && last.role == USER => join(&mut last.content, &text),
            _ => self.turns.push(said(USER, text)),
        }
    }

    /// Returns the messages that the assistant or a tool may continue.
    pub(in crate::api) fn turns(&mut self) -> &mut Vec<Turn> {
        &mut self.turns
    }

    /// Returns the conversation.
    pub(in crate::api) fn finish(mut self) -> Vec<Turn> {
        if !self.system.is_empty() {
            self.turns.insert(0, said(SYSTEM, self.system));
        }
        self.turns
    }
}

fn said(role: &str, content: String) -> Turn {
    Turn::Said(Message {
        role: role.to_owned(),
        content,
        ..Message::default()
    })
}

/// Adds a text behind another one.
pub(in crate::api) fn join(text: &mut String, more: &str) {
    if !text.is_empty() {
        *text += BETWEEN;
    }
    *text += more;
}
