//! Tests of formats, prompts and the parser.

use std::sync::Arc;

use serde_json::json;

use super::frame::Family;
use super::*;
use crate::text::test_tokenizer::byte_level_json;
use crate::text::{
    ChatTemplate, Detokenizer, Message, TemplateArguments, TextFiles, TextOptions, Tokenizer,
};

/// As Qwen's templates write tools, calls and results.
const QWEN: &str = "{% if tools %}<tools>{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% \
        endfor %}{{ '\n' }}\
    </tools>\nAnswer <tool_call>\n{\"name\": <name>, \"arguments\": <args>}\n</tool_call>\n\
    {% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}\
    {% for call in message.tool_calls %}{% set call = call.function %}{{ '\n' }}<tool_call>\n\
    {\"name\": \"{{ call.name }}\", \"arguments\": {{ call.arguments | tojson }}}\n</tool_call>\
    {% endfor %}{{ '\n' }}{% endfor %}";
const FALCON: &str = "{% if tools %}{{ tools | tojson(indent=2) }}\n<tool_call>\\n[\\n  {\"name\": \
    \"function_name\", \"arguments\": {}}\\n]\\n</tool_call>\n{% endif %}\
    {% for message in messages %}{{ message.content }}\
    {% if message.tool_calls %}{{ message.tool_calls | tojson(indent=2) }}{% endif %}{% endfor %}";
const LLAMA: &str = "{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}\
    {% for message in messages %}{% if 'tool_calls' in message %}\
    {% if message.tool_calls | length != 1 %}\
    {{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}\
    {{ '{\"name\": \"' + message.tool_calls[0].function.name + '\", ' }}{{ '\"parameters\": ' }}\
    {{ message.tool_calls[0].function.arguments | tojson }}{{ '}' }}\
    {% else %}{{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}";
const PLAIN: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\
    {% endfor %}";

fn load(template: &str) -> (Arc<Tokenizer>, ChatTemplate, ToolFormat) {
    let json = byte_level_json(&[]);
    let files = TextFiles {
        tokenizer: &json,
        config: None,
        chat_template: Some(template),
        tool_template: None,
    };
    let (tokenizer, template) = files.load(258).unwrap();
    let format = ToolFormat::find(template.as_ref(), &tokenizer);
    (Arc::new(tokenizer), template.unwrap(), format)
}

fn parser(format: &ToolFormat) -> CallParser {
    parser_of(format, ToolChoice::Auto)
}

fn parser_of(format: &ToolFormat, choice: ToolChoice) -> CallParser {
    let named = |name: &str| Tool {
        name: name.to_owned(),
        ..tool()
    };
    let tools = ToolUse {
        tools: ["f", "get.x"].map(named).into(),
        choice,
        is_parallel: true,
    };
    CallParser::new(format.of_answer(choice).unwrap(), &tools)
}

/// The text of an answer and its calls: their names and arguments.
type Parts = (String, Vec<(String, String)>);

fn parse<'a>(format: &ToolFormat, pieces: impl IntoIterator<Item = &'a str>) -> Parts {
    let mut parser = parser(format);
    let mut parts = Parts::default();
    let mut add = |parsed: ParsedText| {
        parts.0 += &parsed.text;
        for delta in parsed.calls {
            match delta {
                CallDelta::Begins(name) => parts.1.push((name, String::new())),
                CallDelta::Arguments(more) => parts.1.last_mut().unwrap().1 += &more,
            }
        }
    };
    for piece in pieces {
        add(parser.push(piece));
    }
    add(parser.finish());
    parts
}

type Case = (
    &'static str,
    &'static str,
    &'static str,
    &'static [(&'static str, &'static str)],
);

const F: (&str, &str) = ("f", "{\"a\": \"}é</tool_call>\\\"{\"}");

#[rustfmt::skip] // One answer, one line.
const CASES: &[Case] = &[
    (QWEN, "plain text\n ", "plain text\n ", &[]),
    (QWEN, "a < b <tool_cal", "a < b <tool_cal", &[]),
    (QWEN, "Hé!\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}é</tool_call>\\\"{\"}}\
        \n</tool_call>", "Hé!", &[F]),
    (QWEN, "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n\n<tool_call>\n{\"name\": \
        \"get.x\", \"arguments\": {\"b\": [{}]}}\n</tool_call>\
        \n", "", &[("f", "{}"), ("get.x", "{\"b\": [{}]}")]),
    (QWEN, "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>", "<tool_call>\
        \n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>", &[]),
    (QWEN, "x <tool_call>no</tool_call> y", "x <tool_call>no</tool_call> y", &[]),
    (QWEN, "<tool_call><tool_call>\n{\"name\": \"f\", \"arguments\": {}}\
        \n</tool_call>", "<tool_call>", &[("f", "{}")]),
    (QWEN, "<tool_call>\n{\"name\": \"f\", \"argum", "<tool_call>\n{\"name\": \"f\", \"argum", &[]),
    (QWEN, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"cut", "", &[("f", "{\"a\": \
        \"cut")]),
    (QWEN, "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_", "", &[("f", "{}")]),
    (QWEN, "<tool_call>\n{\"name\": \"f\", \"arguments\": [1]}\n</tool_call>", "<tool_call>\
        \n{\"name\": \"f\", \"arguments\": [1]}\n</tool_call>", &[]),
    (PLAIN, "so <tool_call>\n{\"name\": \"f\", \"arguments\": {}}\
        \n</tool_call>", "so", &[("f", "{}")]),
    (FALCON, "<tool_call>\n[\n  {\"name\": \"f\", \"arguments\": {}},\n  {\"name\": \"get.x\", \
        \"arguments\": {\"b\": 1}}\n]\n</tool_call>", "", &[("f", "{}"), ("get.x", "{\"b\": 1}")]),
    (FALCON, "ok <tool_call>[{\"name\": \"f\", \"arguments\": {}}\
        ]</tool_call>", "ok", &[("f", "{}")]),
    (FALCON, "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}", "<tool_call>\n{\"name\": \
        \"f\", \"arguments\": {}}", &[]),
    (LLAMA, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "", &[("f", "{\"a\": 1}")]),
    (LLAMA, " \n{ \"name\":\"f\",\"parameters\":{}}; {\"name\": \"get.x\", \"parameters\": {}\
        }", "", &[("f", "{}"), ("get.x", "{}")]),
    (LLAMA, "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}", "", &[("f", "{}")]),
    (LLAMA, "Sure: {\"name\": \"f\", \"parameters\": {}}", "Sure: {\"name\": \"f\", \
        \"parameters\": {}}", &[]),
    (LLAMA, "{\"json\": true} é", "{\"json\": true} é", &[]),
    (LLAMA, "<|pyth", "<|pyth", &[]),
    (LLAMA, "", "", &[]),
];

fn expected(text: &str, calls: &[(&str, &str)]) -> Parts {
    let calls = calls.iter();
    let owned = calls.map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned()));
    (text.to_owned(), owned.collect())
}

#[test]
fn an_answer_has_the_same_parts_wherever_it_is_cut() {
    for (template, answer, text, calls) in CASES {
        let (expected, format) = (expected(text, calls), &load(template).2);
        assert_eq!(parse(format, [*answer]), expected, "{answer:?}");
        let cuts = (0..=answer.len()).filter(|cut| answer.is_char_boundary(*cut));
        let cuts: Vec<usize> = cuts.collect();
        for (index, cut) in cuts.iter().enumerate() {
            for second in &cuts[index..] {
                let pieces = [&answer[..*cut], &answer[*cut..*second], &answer[*second..]];
                assert_eq!(parse(format, pieces), expected, "{pieces:?}");
            }
        }
        let chars: Vec<String> = answer.chars().map(String::from).collect();
        let pieces = chars.iter().map(String::as_str);
        assert_eq!(parse(format, pieces), expected, "{answer:?}");
    }
}

/// Each byte is a token, so characters come in parts.
#[test]
fn tokens_of_single_bytes_have_the_same_parts() {
    for (template, answer, text, calls) in CASES {
        let (tokenizer, _, format) = load(template);
        let options = TextOptions {
            stop: vec!["never".to_owned()],
            include_stop: false,
            skip_special_tokens: true,
            min_tokens: 0,
        };
        let mut detokenizer = Detokenizer::new(tokenizer, options);
        let bytes = answer.bytes().map(u32::from);
        let mut pieces: Vec<String> = bytes.map(|byte| detokenizer.push(byte).text).collect();
        pieces.push(detokenizer.finish().text);
        let parts = parse(&format, pieces.iter().map(String::as_str));
        assert_eq!(parts, expected(text, calls), "{answer:?}");
    }
}

#[test]
fn arguments_are_streamed_and_complete_calls_are_counted() {
    let mut parser = parser(&load(QWEN).2);
    let begins = parser.push("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\"");
    let name = CallDelta::Begins("f".to_owned());
    let first = CallDelta::Arguments("{\"a\"".to_owned());
    assert_eq!(begins.calls, [name, first]);
    let more = parser.push(": 1}");
    assert_eq!(more.calls, [CallDelta::Arguments(": 1}".to_owned())]);
    assert_eq!(parser.complete_calls(), 0);
    assert_eq!(parser.push("}"), ParsedText::default());
    assert_eq!(parser.complete_calls(), 1);
}

#[test]
fn a_forced_call_that_is_cut_off_is_no_text() {
    for (template, call) in [
        (QWEN, "<tool_call>\n{\"name\": \"f\", \"arguments\": {"),
        (
            FALCON,
            "<tool_call>\n[\n  {\"name\": \"f\", \"arguments\": {",
        ),
        (LLAMA, "{\"name\": \"f\", \"parameters\": {"),
    ] {
        for choice in [ToolChoice::Required, ToolChoice::Named(0)] {
            for end in 0..call.len() {
                let mut parser = parser_of(&load(template).2, choice);
                let parsed = [parser.push(&call[..end]), parser.finish()];
                assert_eq!(
                    parsed,
                    [ParsedText::default(), ParsedText::default()],
                    "{end}"
                );
            }
        }
    }
}

#[test]
fn a_beginning_that_never_ends_is_text() {
    let mut parser = parser(&load(QWEN).2);
    let text = format!("<tool_call>{}", " ".repeat(600));
    assert_eq!(parser.push(&text).text + &parser.finish().text, text);
}

fn tool() -> Tool {
    Tool {
        name: "f".to_owned(),
        description: Some("Does <|eot_id|> it.".to_owned()),
        parameters: Some(json!({"type": "object", "properties": {"type": {"type": "string"}}})),
        path: String::new(),
        is_strict: false,
    }
}

fn turns() -> Vec<Turn> {
    let message = |role: &str, content: &str| Message {
        role: role.to_owned(),
        content: content.to_owned(),
        ..Message::default()
    };
    let call = CalledTool {
        id: "call_1".to_owned(),
        name: "f".to_owned(),
        arguments: json!({"b": 1, "a": "<é>"}).as_object().unwrap().clone(),
    };
    vec![
        Turn::Said(message("user", "Go")),
        Turn::Called(message("assistant", ""), vec![call]),
        Turn::Result("call_1".to_owned(), "done".to_owned()),
        Turn::Result("call_2".to_owned(), "too".to_owned()),
    ]
}

fn rendered(template: &str) -> String {
    let (tokenizer, template, format) = load(template);
    let (messages, tools) = format.conversation(turns(), &[tool()], ToolChoice::Auto);
    let end = crate::text::ConversationEnd::NextMessage;
    let none = TemplateArguments::default();
    let prompt = template.prompt_with_tools(end, &tokenizer, &messages, &tools, &none);
    let tokens = prompt.unwrap().tokens;
    // What a user writes becomes no control token.
    assert!(!tokens.contains(&257), "{tokens:?}");
    tokenizer.decode(&tokens, false)
}

#[test]
fn a_template_with_tools_writes_them_itself() {
    assert_eq!(
        rendered(QWEN),
        "<tools>\n{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \
         \"Does <|eot_id|> it.\", \"parameters\": {\"type\": \"object\", \"properties\": \
         {\"type\": {\"type\": \"string\"}}}}}\n</tools>\n\
         Answer <tool_call>\n{\"name\": <name>, \"arguments\": <args>}\n</tool_call>\n\
         user: Go\nassistant: \n<tool_call>\n\
         {\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": \"<é>\"}}\n</tool_call>\n\
         tool: done\ntool: too\n"
    );
    let falcon = rendered(FALCON);
    assert!(
        falcon.starts_with("[\n  {\n    \"type\": \"function\",\n"),
        "{falcon}"
    );
    let call = "Go[\n  {\n    \"name\": \"f\",\n    \"arguments\": {\n      \"b\": 1,\n";
    assert!(falcon.contains(call), "{falcon}");
    let llama = rendered(LLAMA);
    let call = "{\"name\": \"f\", \"parameters\": {\"b\": 1, \"a\": \"<é>\"}}";
    assert!(llama.contains(call), "{llama}");
}

#[test]
fn a_template_without_tools_has_them_in_its_messages() {
    let expected = "system: # Tools\n\n\
        You may call functions to answer the user. Each line in <tools></tools> describes one:\n\
        <tools>\n{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \
        \"Does <|eot_id|> it.\", \"parameters\": {\"type\": \"object\", \"properties\": \
        {\"type\": {\"type\": \"string\"}}}}}\n</tools>\n\n\
        To call a function, write its name and arguments as JSON in <tool_call></tool_call>:\n\
        <tool_call>\n\
        {\"name\": \"function name\", \"arguments\": {\"argument name\": \"value\"}}\n\
        </tool_call>\n\
        user: Go\nassistant: <tool_call>\n\
        {\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": \"<é>\"}}\n</tool_call>\n\
        user: <tool_response>\ndone\n</tool_response>\n<tool_response>\ntoo\n</tool_response>\n";
    assert_eq!(rendered(PLAIN), expected);
    let mentioned = format!("{PLAIN}{{% if tools %}}[TOOL_CALLS]{{% endif %}}");
    assert_eq!(rendered(&mentioned), expected);
}

/// Templates that print tools in formats that the server cannot read, with what they ask of calls.
const MISTRAL: &str = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}\
    {% for message in messages %}{% if message.tool_calls %}[TOOL_CALLS]\
    {% for call in message.tool_calls %}{% if call.id | length != 9 %}\
    {{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}\
    {{ call.function | tojson }}{{ call.id }}{% endfor %}{% elif message.role == 'tool' %}\
    [TOOL_RESULTS]{{ message.content }}{{ message.tool_call_id }}{% else %}\
    [{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}";
const DEEPSEEK: &str = "{% for tool in tools %}tool {{ tool.function.name }}\n{% endfor %}\
    {% for message in messages %}{% if message.tool_calls %}{% for call in message.tool_calls %}\
    {{ 'call ' + call.function.name + '\n' + call.function.arguments + '\n' }}{% endfor %}\
    {% else %}{{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}";

#[test]
fn a_template_with_tools_in_another_format_is_used_as_it_is() {
    let tools = "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \
        \"Does <|eot_id|> it.\", \"parameters\": {\"type\": \"object\", \"properties\": \
        {\"type\": {\"type\": \"string\"}}}}}]";
    assert_eq!(
        rendered(MISTRAL),
        format!(
            "[AVAILABLE_TOOLS]{tools}[user]Go[TOOL_CALLS]{{\"name\": \"f\", \"arguments\": \
             {{\"b\": 1, \"a\": \"<é>\"}}}}0000call1[TOOL_RESULTS]done0000call1\
             [TOOL_RESULTS]too0000call2"
        )
    );
    let deepseek = "tool f\nuser: Go\ncall f\n{\"b\": 1, \"a\": \"<é>\"}\ntool: done\ntool: too\n";
    assert_eq!(rendered(DEEPSEEK), deepseek);
    let (_, _, format) = load(DEEPSEEK);
    assert_eq!(format.of_answer(ToolChoice::Auto), None);
    // A call that a request forces is in the server's own format.
    let forced = ToolChoice::Named(0);
    let (_, _, own) = load(PLAIN);
    assert_eq!(format.of_answer(forced), own.of_answer(ToolChoice::Auto));
    let described = format.conversation(turns(), &[tool()], forced);
    assert_eq!(described, own.conversation(turns(), &[tool()], forced));
}

#[test]
fn a_template_of_tools_is_for_conversations_with_tools() {
    let json = byte_level_json(&[]);
    let named = [("default", PLAIN), ("tool_use", QWEN)];
    let named = named.map(|(name, template)| json!({"name": name, "template": template}));
    let config = json!({"chat_template": named}).to_string();
    let listed = TextFiles {
        tokenizer: &json,
        config: Some(config.as_bytes()),
        chat_template: None,
        tool_template: None,
    };
    let files = TextFiles {
        config: None,
        chat_template: Some(PLAIN),
        tool_template: Some(QWEN),
        ..listed
    };
    for files in [listed, files] {
        let (tokenizer, template) = files.load(258).unwrap();
        let format = ToolFormat::find(template.as_ref(), &tokenizer);
        assert_eq!(
            format.of_answer(ToolChoice::Auto),
            load(QWEN).2.of_answer(ToolChoice::Auto)
        );
        let text = |tools: &[Tool]| {
            let (messages, tools) = format.conversation(turns(), tools, ToolChoice::Auto);
            template
                .as_ref()
                .unwrap()
                .render_with_tools(&messages, &tools)
                .unwrap()
        };
        assert_eq!(text(&[tool()]), rendered(QWEN));
        // Without tools, the other template cannot print calls.
        let call = "assistant: <tool_call>\n{\"name\": \"f\", \"arguments\": {\"b\": 1, ";
        assert!(
            text(&[]).starts_with(&format!("user: Go\n{call}")),
            "{}",
            text(&[])
        );
    }
    let replaced = TextFiles {
        chat_template: Some(PLAIN),
        ..listed
    };
    let template = replaced.load(258).unwrap().1.unwrap();
    assert_eq!(
        template.tool_source(),
        None,
        "a file takes the place of the list"
    );
}

/// As Qwen 3.5 writes tools and calls.
const XML: &str = "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}\
    </tools>\n<tool_call>\n<function=example>\n<parameter=a>\nvalue\n</parameter>\n</function>\n\
    </tool_call>\n{% endif %}{% for message in messages %}{{ message.role }}: \
    {{ message.content }}{% for call in message.tool_calls %}\n<tool_call>\n\
    <function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}\
    <parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n\
    {% endfor %}</function>\n</tool_call>{% endfor %}\n{% endfor %}";

fn xml_tools(choice: ToolChoice) -> ToolUse {
    let parameters = json!({
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "count": {"type": "integer"},
            "list": {"type": "array", "items": {"$ref": "#/$defs/point"}},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["text"],
        "additionalProperties": false,
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}}},
    });
    let f = Tool {
        parameters: Some(parameters),
        ..tool()
    };
    let open = Tool {
        name: "get.x".to_owned(),
        parameters: Some(json!({"type": "object"})),
        ..tool()
    };
    let tools = vec![f, open];
    ToolUse {
        tools,
        choice,
        is_parallel: true,
    }
}

/// The schema of an argument was prepared alone, where a reference meant something else than in the
/// whole schema.
#[test]
fn an_argument_is_prepared_as_a_part_of_its_schema() {
    let inner = json!({"$ref": "#/x%20y", "x y": {"const": 9_007_199_254_740_993_i64}});
    let point = json!({"$ref": "#/$defs/a%20point"});
    let parameters = json!({"type": "object", "properties": {"a": inner, "b": point},
        "$defs": {"a point": {"type": "object", "properties": {"x": {"type": "number"}}}}});
    crate::constraint::GrammarSource::lenient_json_schema(&parameters).unwrap();
    let f = Tool {
        parameters: Some(parameters),
        ..tool()
    };
    let mut lark = String::new();
    grammar::xml_call(&mut lark, Family::Xml.frame(), 0, &f);
    assert!(lark.contains("\"$ref\":\"#/$defs/escaped-0\""), "{lark}");
}

/// An answer, its text, and the names and arguments of its calls.
type AnswerCase = (
    &'static str,
    &'static str,
    &'static [(&'static str, &'static str)],
);

#[rustfmt::skip] // One answer, one line.
const XML_CASES: &[AnswerCase] = &[
    ("Hé <tool_cal", "Hé <tool_cal", &[]),
    ("Hé!\n\n<tool_call>\n<function=f>\n<parameter=text>\na \"b\"\n\\é</parameter>\n\n\
        </parameter>\n</function>\n</tool_call>",
     "Hé!", &[("f", "{\"text\": \"a \\\"b\\\"\\n\\\\é</parameter>\\n\"}")]),
    ("<tool_call>\n<function=f>\n<parameter=text>\nif a < b:\n  \"c\"\\d\n</parameter>\n\
        <parameter=count>\n-3\n</parameter>\n<parameter=list>\n[{\"x\": 1.5}]\n</parameter>\n\
        </function>\n</tool_call>",
     "", &[("f", "{\"text\": \"if a < b:\\n  \\\"c\\\"\\\\d\", \"count\": -3, \
        \"list\": [{\"x\": 1.5}]}")]),
    ("<tool_call>\n<function=f>\n<parameter=text>\n\n</parameter>\n<parameter=maybe>\nnull\n\
        </parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=text>\n\
        </parameter>\n<parameter=maybe>\nnullable\n</parameter>\n</function>\n</tool_call>\n",
     "", &[("f", "{\"text\": \"\", \"maybe\": null}"),
        ("f", "{\"text\": \"\", \"maybe\": \"nullable\"}")]),
    ("<tool_call>\n<function=get.x>\n<parameter=a>\n12\n</parameter>\n<parameter=b\">\n12 x\n\
        </parameter>\n</function>\n</tool_call>",
     "", &[("get.x", "{\"a\": 12, \"b\\\"\": \"12 x\"}")]),
    ("<tool_call>\n<function=get.x>\n</function>\n</tool_call>", "", &[("get.x", "{}")]),
    ("<tool_call>\n<function=g>\n</function>\n</tool_call>", "<tool_call>\n<function=g>\n\
        </function>\n</tool_call>", &[]),
    ("<tool_call>\n<function=f>\n<parameter=text>\ncut of", "", &[("f", "{\"text\": \"cut of")]),
    ("<tool_call>\n<function=f>\n<parameter=text>\ncut\n</para", "", &[("f", "{\"text\": \"cut")]),
    ("x <tool_call>no</tool_call> y", "x <tool_call>no</tool_call> y", &[]),
];

#[test]
fn xml_becomes_json_wherever_it_is_cut() {
    let (_, _, format) = load(XML);
    let format = format.of_answer(ToolChoice::Auto).unwrap();
    let parse = |pieces: &[&str]| {
        let mut parser = CallParser::new(format, &xml_tools(ToolChoice::Auto));
        let mut parts = Parts::default();
        let mut parsed: Vec<ParsedText> = pieces.iter().map(|piece| parser.push(piece)).collect();
        parsed.push(parser.finish());
        for piece in parsed {
            parts.0 += &piece.text;
            for delta in piece.calls {
                match delta {
                    CallDelta::Begins(name) => parts.1.push((name, String::new())),
                    CallDelta::Arguments(more) => parts.1.last_mut().unwrap().1 += &more,
                }
            }
        }
        parts
    };
    for (answer, text, calls) in XML_CASES {
        let expected = expected(text, calls);
        for cut in (0..=answer.len()).filter(|cut| answer.is_char_boundary(*cut)) {
            let pieces = [&answer[..cut], &answer[cut..]];
            assert_eq!(parse(&pieces), expected, "{pieces:?}");
        }
        let chars: Vec<String> = answer.chars().map(String::from).collect();
        let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
        assert_eq!(parse(&chars), expected, "{answer:?}");
        if answer.ends_with("</tool_call>") {
            for (_, arguments) in expected.1 {
                assert!(serde_json::from_str::<serde_json::Value>(&arguments).is_ok());
            }
        }
    }
}

#[test]
fn a_template_with_xml_prints_its_own_calls() {
    let text = rendered(XML);
    let call = "assistant: <tool_call>\n<function=f>\n<parameter=b>\n1\n</parameter>\n\
        <parameter=a>\n<é>\n\
        </parameter>\n</function>\n</tool_call>tool: done";
    assert!(text.contains(call), "{text}");
}
