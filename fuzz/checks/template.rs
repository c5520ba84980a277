//! Renders a conversation of a stranger with templates that checkpoints have. A checkpoint's
//! template is trusted; what a request can do with it is not.

use serde_json::json;
use sterna::text::{ChatTemplate, Message, TemplateArguments, TemplateError};

/// Templates in the styles of real checkpoints.
const TEMPLATES: [&str; 5] = [
    // ChatML.
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\
     {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    // Llama 2: roles alternate.
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
     {{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}\
     {{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}{% else %}\
     {{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    // DeepSeek R1: joins the system messages, and drops the reasoning of answers.
    "{% set ns = namespace(system='', first=true) %}{% for m in messages %}\
     {% if m.role == 'system' %}{% if ns.first %}{% set ns.system = ns.system + m.content %}\
     {% set ns.first = false %}{% else %}{% set ns.system = ns.system + '\n\n' + m.content %}\
     {% endif %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}{% for m in messages %}\
     {% set text = m.content %}{% if '</think>' in text %}\
     {% set text = text.split('</think>')[-1] %}{% endif %}{{ text | trim }}{% endfor %}",
    // Qwen3: looks for the final question from the end.
    "{% set ns = namespace(last=messages | length - 1) %}{% for m in messages[::-1] %}\
     {% set index = (messages | length - 1) - loop.index0 %}{% if m.role == 'user' and not\
     (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}\
     {% set ns.last = index %}{% endif %}{% endfor %}{% for m in messages %}\
     {{ m.role }}{% if loop.index0 > ns.last %}{{ m.content.lstrip('\n') }}{% else %}\
     {{ m.content.split('<think>')[-1].rstrip('\n') | replace('  ', ' ') | upper }}{% endif %}\
     {% endfor %}",
    // Mistral: writes JSON, and names of roles by a macro.
    "{% macro name(role) %}{{ role | capitalize }}{% endmacro %}{% for m in messages %}\
     {{ name(m.role) }}: {{ m | tojson }}{{ m.content | tojson(indent=2) }}{% endfor %}\
     {{ messages | map(attribute='role') | join(',') }}",
];

/// The texts between zero bytes are the messages. A byte before them chooses the template.
///
/// Checks that a template never fails: it writes a text, or rejects the conversation.
pub fn check(data: &[u8]) {
    let (choice, texts) = data.split_first().unwrap_or((&0, &[]));
    let source = TEMPLATES[usize::from(*choice) % TEMPLATES.len()];
    let config = json!({"bos_token": "<s>", "eos_token": "</s>"});
    let template = ChatTemplate::find(&config, Some(source), None).expect("the template compiles");
    let template = template.expect("there is a template");
    let roles = ["user", "assistant", "user", "system"].into_iter().cycle();
    let messages: Vec<Message> = String::from_utf8_lossy(texts)
        .split('\0')
        .zip(roles)
        .map(|(content, role)| Message {
            role: role.into(),
            content: content.into(),
            ..Message::default()
        })
        .collect();
    match template.render(&messages, &TemplateArguments::default()) {
        Ok(_) | Err(TemplateError::Rejected(_)) => {}
        Err(error) => panic!("{error}: {source}"),
    }
}
