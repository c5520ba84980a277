//! Whole conversations as Claude Code and Codex send them: instructions inside of the conversation,
//! tools of every type, streams, and calls with their results. The texts are our own; the shapes
//! are those of claude-code 2.1 and codex 0.169.

use axum::Router;
use serde_json::{Value, json};

use crate::harness::*;
use crate::speaker::{self, post};

/// As Qwen's templates, which write tools, calls and results.
const TEMPLATE: &str = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}\
    <tool_call>\n{\"name\": \"x\", \"arguments\": {}}\n</tool_call>\n{% endif %}\
    {% for message in messages %}{{ message.role }}: {{ message.content }}\
    {% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} \
    {{ call.function.arguments | tojson }}</tool_call>{% endfor %}\n{% endfor %}assistant:";

const CALL: &str = "I look.\n<tool_call>\n{\"name\": \"Read\", \"arguments\": \
    {\"file_path\": \"/a\"}}\n</tool_call>";

fn say(answer: &str) -> Router {
    say_in(TEMPLATE, answer)
}

fn say_in(template: &str, answer: &str) -> Router {
    speaker::start(TOKENIZER, template, VOCABULARY, |tokenizer| {
        tokenizer.encode_prompt(answer).unwrap().split_off(1)
    })
}

/// Returns the data of a stream's events.
fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    let lines = answer.body.lines();
    let data = lines.filter_map(|line| line.strip_prefix("data: "));
    data.map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

fn all_texts(events: &[Value], kind: &str, field: &str) -> String {
    let deltas = events
        .iter()
        .filter(|event| event["type"] == kind || event["delta"]["type"] == kind);
    let text = |event: &Value| {
        let delta = &event["delta"];
        let text = delta.as_str().or_else(|| delta[field].as_str());
        text.unwrap().to_owned()
    };
    deltas.map(text).collect()
}

/// Returns the prompt of a request of Claude Code.
async fn prompt_tokens(router: &Router, path: &str, body: &Value) -> u64 {
    let answer = post(router, path, body).await.ok();
    answer["input_tokens"].as_u64().unwrap()
}

fn claude_code(messages: Value) -> Value {
    let path = json!({"type": "string", "description": "An absolute path."});
    let line = json!({
        "type": "integer", "exclusiveMinimum": 0, "maximum": 9_007_199_254_740_991_i64,
    });
    let read = json!({
        "name": "Read",
        "description": "Reads a file.",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"file_path": path, "limit": line},
            "required": ["file_path"],
            "additionalProperties": false,
        },
    });
    let answers = json!({
        "type": "object", "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "string"},
    });
    let ask = json!({
        "name": "AskUserQuestion",
        "description": "Asks the user.",
        "input_schema": {
            "type": "object", "properties": {"answers": answers, "url": {"format": "uri"}},
        },
        "cache_control": {"type": "ephemeral"},
    });
    let search = json!({"type": "web_search_20250305", "name": "web_search", "max_uses": 8});
    let cached = json!({"type": "ephemeral"});
    json!({
        "model": "default",
        "messages": messages,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197;"},
            {"type": "text", "text": "You help with code.", "cache_control": cached},
        ],
        "tools": [read, ask, search],
        "metadata": {"user_id": "{\"device_id\":\"0\",\"session_id\":\"1\"}"},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "temperature": 0,
        "stream": true,
    })
}

fn first_turns() -> Value {
    let reminder = "<system-reminder>\nToday is a Monday.\n</system-reminder>";
    json!([
        {"role": "user", "content": [
            {"type": "text", "text": reminder},
            {"type": "text", "text": "What is in /a?", "cache_control": {"type": "ephemeral"}},
        ]},
        {"role": "system", "content": "Agents that you may start: none."},
    ])
}

#[tokio::test]
async fn claude_code_reads_a_file_and_answers() {
    let messages = "/v1/messages?beta=true";
    let opening = claude_code(first_turns());
    let first = events(&post(&say(CALL), messages, &opening).await);
    assert_eq!(all_texts(&first, "text_delta", "text"), "I look.");
    let begun = first
        .iter()
        .find(|event| event["content_block"]["type"] == "tool_use");
    let call = begun.unwrap()["content_block"].clone();
    let input = all_texts(&first, "input_json_delta", "partial_json");
    let input: Value = serde_json::from_str(&input).unwrap();
    assert_eq!(input, json!({"file_path": "/a"}));
    let end = first.iter().find(|event| event["type"] == "message_delta");
    assert_eq!(end.unwrap()["delta"]["stop_reason"], "tool_use");

    let mut turns = first_turns();
    let used = json!({
        "type": "tool_use", "id": call["id"], "name": call["name"], "input": input,
    });
    let result = json!({
        "type": "tool_result", "tool_use_id": call["id"], "content": "1\thello", "is_error": false,
    });
    turns.as_array_mut().unwrap().extend([
        json!({"role": "assistant", "content": [
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "text", "text": "I look."},
            used,
        ]}),
        json!({"role": "user", "content": [result]}),
        json!({"role": "system", "content": [{"type": "text", "text": "Files may change."}]}),
    ]);
    let router = say("It says hello.");
    let answer = post(&router, messages, &claude_code(turns.clone())).await;
    let second = events(&answer);
    assert_eq!(all_texts(&second, "text_delta", "text"), "It says hello.");
    let end = second.iter().find(|event| event["type"] == "message_delta");
    assert_eq!(end.unwrap()["delta"]["stop_reason"], "end_turn");
    // The longer conversation begins as the shorter one, so that the cache has its beginning.
    let count = "/v1/messages/count_tokens";
    let [short, long] = [claude_code(first_turns()), claude_code(turns)];
    let short_tokens = prompt_tokens(&router, count, &short).await;
    assert!(short_tokens < prompt_tokens(&router, count, &long).await);
    post(&router, messages, &short).await;
    let again = events(&post(&router, messages, &long).await);
    let end = again.iter().find(|event| event["type"] == "message_delta");
    let cached = end.unwrap()["usage"]["cache_read_input_tokens"]
        .as_u64()
        .unwrap();
    assert!(cached + 32 > short_tokens, "{cached} of {short_tokens}");
}

fn codex(input: Value) -> Value {
    let command = json!({
        "type": "function", "name": "exec_command", "description": "Runs a command.",
        "strict": false,
        "parameters": {
            "type": "object",
            "properties": {
                "cmd": {"type": "string"},
                "yield_time_ms": {"type": "number"},
                "prefix_rule": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["cmd"],
            "additionalProperties": false,
        },
    });
    let agents = json!({
        "type": "namespace", "name": "agents", "description": "Starts agents.", "tools": [command],
    });
    let patch = json!({
        "type": "custom", "name": "apply_patch", "description": "Changes files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
    });
    json!({
        "model": "default",
        "instructions": "You write code.",
        "input": input,
        "tools": [
            command, agents, patch, {"type": "web_search", "external_web_access": false},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": true,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": false,
        "stream": true,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
        "client_metadata": {"session_id": "a"},
        "text": {"verbosity": "medium"},
        "temperature": 0,
    })
}

fn codex_item(role: &str, text: &str) -> Value {
    json!({
        "type": "message", "id": "msg_1", "role": role,
        "content": [{"type": "input_text", "text": text}],
    })
}

fn codex_turns() -> Vec<Value> {
    vec![
        codex_item("developer", "The sandbox is read-only."),
        codex_item(
            "user",
            "<environment_context><cwd>/a</cwd></environment_context>",
        ),
        codex_item("user", "What is here?"),
    ]
}

#[tokio::test]
async fn codex_runs_a_command_and_answers() {
    let call = "<tool_call>\n{\"name\": \"exec_command\", \"arguments\": {\"cmd\": \"ls\"}}\n\
        </tool_call>";
    let responses = "/v1/responses";
    let first = events(&post(&say(call), responses, &codex(json!(codex_turns()))).await);
    let last = first.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    let made = &last["response"]["output"][0];
    assert_eq!(made["type"], "function_call");
    assert_eq!(made["name"], "exec_command");
    let arguments = all_texts(&first, "response.function_call_arguments.delta", "delta");
    assert_eq!(made["arguments"], arguments);

    let mut turns = codex_turns();
    let output = json!({
        "type": "function_call_output", "call_id": made["call_id"], "output": "file.txt",
    });
    let reasoning = json!({
        "type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": null,
    });
    turns.extend([reasoning, made.clone(), output]);
    turns.push(codex_item("developer", "Answer now."));
    let router = say("One file.");
    let second = events(&post(&router, responses, &codex(json!(turns))).await);
    assert_eq!(
        all_texts(&second, "response.output_text.delta", "delta"),
        "One file."
    );
    assert_eq!(second.last().unwrap()["type"], "response.completed");
}

/// Codex begins with two messages of instructions, and with two of the user.
#[tokio::test]
async fn the_turns_of_codex_fit_templates_that_alternate() {
    let template = "{% for message in messages %}\
        {% if message.role == 'system' and not loop.first %}\
        {{ raise_exception('System message must be at the beginning.') }}{% endif %}\
        {% if not loop.first and message.role == messages[loop.index0 - 1].role %}\
        {{ raise_exception('Roles must alternate.') }}{% endif %}\
        {{ message.role }}: {{ message.content }}\n{% endfor %}assistant:";
    let router = say_in(template, "Yes.");
    let mut turns = codex_turns();
    turns.push(json!({
        "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A."}],
    }));
    turns.push(codex_item("developer", "Be short."));
    turns.push(codex_item("user", "Sure?"));
    let request = merged(codex(json!(turns)), json!({"tools": []}));
    let count = prompt_tokens(&router, "/v1/responses/input_tokens", &request).await;
    let environment = "<environment_context><cwd>/a</cwd></environment_context>";
    let expected = format!(
        "system: You write code.\n\nThe sandbox is read-only.\nuser: {environment}\n\nWhat is \
         here?\nassistant: A.\nuser: <system-reminder>\nBe short.\n</system-reminder>\n\nSure?\n\
         assistant:"
    );
    let text = post(&router, "/tokenize", &json!({"content": expected}))
        .await
        .ok();
    assert_eq!(text["count"], count);
}
