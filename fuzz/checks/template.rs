//! Compiles a chat template from a stranger, and renders a conversation with it. The template ends
//! at the first zero byte, and a user's message follows.

use serde_json::json;
use sterna::text::{ChatTemplate, Message, TemplateArguments};

/// Checks that a template ends, with a text or with an error. libFuzzer limits its memory.
pub fn check(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (source, content) = text.split_once('\0').unwrap_or((&text, "Hello </s> you"));
    let config = json!({"bos_token": "<s>", "eos_token": "</s>"});
    let Ok(Some(template)) = ChatTemplate::find(&config, Some(source)) else {
        return;
    };
    let message = |role: &str, content: &str| Message {
        role: role.into(),
        content: content.into(),
        ..Message::default()
    };
    let messages = [
        message("system", "Be brief."),
        message("user", content),
        message("assistant", "mumble</think> Hello."),
        message("user", content),
    ];
    if let Ok(rendered) = template.render(&messages, &TemplateArguments::default()) {
        assert!(rendered.len() <= 16 << 20, "{} bytes", rendered.len());
    }
}
