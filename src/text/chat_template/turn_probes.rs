//! Finds out which conversations a chat template can write: a system message inside of one, and
//! messages of the user that follow each other.
//!
//! Templates differ: some refuse such a system message, some leave it out, some move it to the
//! front, and some write it as if the user or the assistant had said it. Only rendering one shows
//! what a template does.

use super::{ChatTemplate, Message, TemplateArguments};

const BEFORE: &str = "first question";
const INSIDE: &str = "further instructions";

/// Returns whether `template` writes system messages in their place, and unlike other messages.
pub(super) fn writes_system_turns(template: &ChatTemplate) -> bool {
    [true, false].into_iter().all(|ends_there| {
        let render =
            |role| template.render(&conversation(role, ends_there), &TemplateArguments::new());
        let Ok(written) = render("system") else {
            return false;
        };
        let others = ["user", "assistant"].map(render);
        let is_other = others.iter().flatten().any(|other| *other == written);
        let places = written.find(BEFORE).zip(written.find(INSIDE));
        places.is_some_and(|(before, inside)| before < inside) && !is_other
    })
}

/// Returns whether `template` writes two messages of the user in a row.
pub(super) fn writes_users_in_a_row(template: &ChatTemplate) -> bool {
    let written = template.render(&conversation("user", true), &TemplateArguments::new());
    written.is_ok_and(|text| text.contains(BEFORE) && text.contains(INSIDE))
}

/// Returns a conversation with a message of `role` at its end or before an answer.
fn conversation(role: &str, ends_there: bool) -> Vec<Message> {
    let said = |role: &str, content: &str| Message {
        role: role.to_owned(),
        content: content.to_owned(),
        ..Message::default()
    };
    let mut messages = vec![
        said("system", "instructions"),
        said("user", BEFORE),
        said(role, INSIDE),
    ];
    if !ends_there {
        messages.extend([said("assistant", "answer"), said("user", "second question")]);
    }
    messages
}
