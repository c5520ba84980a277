//! What a grammar means for one answer.

use serde_json::{Value, json};
use sterna::constraint::{GrammarError, GrammarSource};
use sterna::engine::FinishReason;
use sterna::text::{ReasoningStart, ReasoningTags};

use super::lab::{END, Lab};

fn schema(value: Value) -> GrammarSource {
    GrammarSource::json_schema(&value).unwrap()
}

#[tokio::test]
async fn an_answer_follows_its_grammar_and_then_ends() {
    let lab = Lab::new(256, 6);
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    let choices = ["yes".to_owned(), "no, \"never\"".to_owned()];
    let lark = "start: \"a\" list\nlist: \"[\" INT (\",\" INT)~0..3 \"]\"\nINT: /[1-9][0-9]/";
    let gbnf = "root ::= \"x\" item{2,3} # twice or three times\nitem ::= [a-c] | \"--\"";
    for number in 0..8 {
        let grammar = lab.compile(schema(person.clone())).await.unwrap();
        let answer = lab.answer(lab.request(number, Some(grammar))).await;
        assert_eq!(answer.reason, Some(FinishReason::Stop), "{answer:?}");
        let value: Value = serde_json::from_str(&answer.text).unwrap();
        assert!(jsonschema::is_valid(&person, &value), "{value}");
        assert_eq!(answer.tokens.last(), Some(&END));

        let one = GrammarSource::choice(&choices).unwrap();
        let grammar = lab.compile(one).await.unwrap();
        let answer = lab.answer(lab.request(number, Some(grammar))).await;
        assert!(choices.contains(&answer.text), "{answer:?}");

        for (source, pattern) in [
            (GrammarSource::regex("^[a-f]{3}-é?$"), r"\A[a-f]{3}-é?\z"),
            (
                GrammarSource::grammar(lark),
                r"\Aa\[[1-9][0-9](,[1-9][0-9]){0,3}\]\z",
            ),
            (GrammarSource::grammar(gbnf), r"\Ax([a-c]|--){2,3}\z"),
        ] {
            let grammar = lab.compile(source.unwrap()).await.unwrap();
            let answer = lab.answer(lab.request(number, Some(grammar))).await;
            let pattern = regex::Regex::new(pattern).unwrap();
            assert!(pattern.is_match(&answer.text), "{pattern}: {answer:?}");
        }
    }
}

#[tokio::test]
async fn a_stop_token_is_drawn_only_where_the_grammar_may_end() {
    let lab = Lab::new(256, 6);
    let digit = lab.tokenizer.encode_plain("7").unwrap()[0];
    let three = GrammarSource::regex("[0-9]{3}").unwrap();
    let grammar = lab.compile(three).await.unwrap();
    for number in 0..20 {
        // The client's own stop token is a digit: it is not drawn before the end.
        let mut request = lab.request(number, Some(grammar.clone()));
        request.stop_tokens.push(digit);
        let answer = lab.answer(request).await;
        assert_eq!(answer.reason, Some(FinishReason::Stop), "{answer:?}");
        let (last, digits) = answer.tokens.split_last().unwrap();
        assert!(*last == END || *last == digit, "{answer:?}");
        assert!(!digits.contains(&digit) && digits.len() <= 3, "{answer:?}");
    }
}

/// A request with `ignore_eos` and stop tokens of its own drew the model's end token, and then had
/// nothing to draw.
#[tokio::test]
async fn only_the_requests_stop_tokens_end_an_answer() {
    let lab = Lab::new(256, 6);
    let digit = lab.tokenizer.encode_plain("7").unwrap()[0];
    for pattern in ["[0-9]{3}", "[0-9]{0,9}"] {
        let source = GrammarSource::regex(pattern).unwrap();
        let grammar = lab.compile(source).await.unwrap();
        for number in 0..20 {
            let mut request = lab.request(number, Some(grammar.clone()));
            request.stop_tokens = vec![digit];
            let answer = lab.answer(request).await;
            assert_eq!(answer.reason, Some(FinishReason::Stop), "{answer:?}");
            assert_eq!(answer.tokens.last(), Some(&digit));
            assert!(!answer.tokens.contains(&END), "{answer:?}");
        }
    }
}

#[tokio::test]
async fn a_dead_end_ends_its_request_with_the_reason() {
    let lab = Lab::new(256, 6);
    let word = GrammarSource::regex("[ab]{4}").unwrap();
    let grammar = lab.compile(word).await.unwrap();
    // The bias forbids every token that the grammar allows.
    let mut request = lab.request(1, Some(grammar.clone()));
    let forbidden = (0..309).filter(|token| {
        let bytes = lab.tokenizer.token_bytes(*token);
        bytes.iter().all(|byte| b"ab".contains(byte))
    });
    request.sampling.logit_bias = forbidden.map(|token| (token, f32::NEG_INFINITY)).collect();
    let answer = lab.answer(request).await;
    assert!(answer.dead_end.unwrap().contains("the bias"));
    // The grammar ends, but no token ends the answer.
    let mut request = lab.request(1, Some(grammar.clone()));
    request.stop_tokens.clear();
    let answer = lab.answer(request).await;
    assert_eq!(answer.text.len(), 4);
    assert!(answer.dead_end.is_some(), "{answer:?}");
    // The answer must be longer than the grammar allows.
    let mut request = lab.request(1, Some(grammar));
    request.min_new_tokens = 10;
    assert!(lab.answer(request).await.dead_end.is_some());
    // The next request finds an engine that works.
    let answer = lab.answer(lab.request(2, None)).await;
    assert!(answer.reason.is_some());
}

#[tokio::test]
async fn a_grammar_that_cannot_be_compiled_is_refused_with_the_reason() {
    let lab = Lab::new(64, 0);
    for (source, why) in [
        (schema(json!({"type": "text"})), "text"),
        (
            schema(json!({"$ref": "https://example.org/schema"})),
            "$ref",
        ),
        (
            schema(json!({"type": "integer", "minimum": 2, "maximum": 1})),
            "",
        ),
        (schema(json!(false)), "not"),
        (GrammarSource::regex("(a").unwrap(), ""),
        (GrammarSource::regex("(?=a)b").unwrap(), ""),
        (GrammarSource::grammar("begin: \"a\"").unwrap(), "start"),
        (
            GrammarSource::grammar("root ::= missing").unwrap(),
            "missing",
        ),
    ] {
        let error = lab.compile(source.clone()).await.unwrap_err();
        let GrammarError::Invalid(text) = &error else {
            panic!("{source:?}: {error:?}");
        };
        assert!(
            text.contains(why) && text.len() < 1000,
            "{source:?}: {text}"
        );
    }
}

#[tokio::test]
async fn schemas_of_generators_mean_what_they_say() {
    let lab = Lab::new(256, 6);
    let object = |kind: &str| {
        let kind = json!({"const": kind});
        json!({"type": "object", "properties": {"kind": kind}, "required": ["kind"]})
    };
    let definitions = json!({"a/b": {"type": "boolean"}, "c d": {"type": "null"},
        "e~f": object("e"), "g%h": object("g")});
    let to = |name: &str| json!({"$ref": format!("#/$defs/{name}")});
    let part = |name: &str, is_required: bool| {
        let required = if is_required { vec![name] } else { Vec::new() };
        let properties = json!({name: {"type": "integer"}});
        json!({"type": "object", "properties": properties, "required": required})
    };
    let int64 = json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX});
    for (own, accepted, refused) in [
        (to("a~1b"), vec!["true"], vec!["null"]),
        (to("c%20d"), vec!["null"], vec!["true"]),
        (
            to("e~0f"),
            vec!["{\"kind\": \"e\"}"],
            vec!["{\"kind\": \"g\"}"],
        ),
        (
            json!({"oneOf": [to("e~0f"), to("g%25h"), to("c%20d")]}),
            vec!["{\"kind\": \"g\"}", "null"],
            vec!["{\"kind\": \"x\"}"],
        ),
        (
            json!({"oneOf": [part("a", true), part("b", true)]}),
            vec!["{\"a\": 1}", "{\"b\": 1}"],
            vec!["{}", "{\"a\": 1, \"b\": 1}"],
        ),
        (
            int64,
            vec![
                "0",
                "-9200000000000000000",
                "9200000000000000000",
                "9007199254740993",
            ],
            vec!["9300000000000000000", "-9300000000000000000"],
        ),
        (
            json!({"type": "integer", "maximum": 9_007_199_254_740_995_i64}),
            vec!["9007199254740994"],
            vec!["9007199254740996"],
        ),
        (
            json!({"type": "object", "propertyNames": {"type": "string"}}),
            vec!["{}"],
            vec!["[]"],
        ),
    ] {
        let mut whole = own.clone();
        whole["$defs"] = definitions.clone();
        let grammar = lab.compile(schema(whole)).await.unwrap();
        for text in accepted {
            assert!(lab.accepts(&grammar, text), "{own}: {text}");
        }
        for text in refused {
            assert!(!lab.accepts(&grammar, text), "{own}: {text}");
        }
    }
    // {"a": 1} fits both, as a client reads them.
    let either = json!({"oneOf": [part("a", true), part("b", false)]});
    assert!(lab.compile(schema(either)).await.is_err());
}

#[tokio::test]
async fn a_choice_may_have_thousands_of_texts() {
    let lab = Lab::new(256, 6);
    let texts: Vec<String> = (0..4000).map(|number| format!("item {number}")).collect();
    let listed = schema(json!({ "enum": texts }));
    for source in [GrammarSource::choice(&texts).unwrap(), listed.clone()] {
        let grammar = lab.compile(source.clone()).await.unwrap();
        let text = |text: &str| match source == listed {
            true => format!("\"{text}\""),
            false => text.to_owned(),
        };
        assert!(lab.accepts(&grammar, &text("item 3999")));
        assert!(lab.accepts(&grammar, &text("item 39")));
        assert!(!lab.accepts(&grammar, &text("item 4000")));
    }
}

#[test]
fn what_cannot_be_enforced_is_refused_by_its_path() {
    for (keyword, value) in [
        ("uniqueItems", json!(true)),
        ("contains", json!({})),
        ("not", json!({"type": "null"})),
        ("if", json!({"type": "null"})),
        ("propertyNames", json!({"pattern": "a"})),
        ("dependentRequired", json!({"a": ["b"]})),
        ("unevaluatedProperties", json!(false)),
    ] {
        let own = json!({ keyword: value });
        let whole = json!({"properties": {"a/b": {"items": own}}});
        let refused = GrammarSource::json_schema(&whole).unwrap_err().to_string();
        let path = format!("'{keyword}' at '#/properties/a~1b/items/{keyword}'");
        assert!(refused.contains(&path), "{refused}");
        assert!(GrammarSource::lenient_json_schema(&whole).is_ok());
        // A property may have the name of a keyword.
        let name = json!({"properties": { keyword: {"type": "string"} }});
        assert!(GrammarSource::json_schema(&name).is_ok());
    }
}

#[tokio::test]
async fn a_grammar_begins_after_reasoning_that_the_prompt_has_opened() {
    let lab = Lab::new(256, 6);
    // The closing tag is a token of its own. Its bias makes it come soon.
    let close = 3;
    let tags = ReasoningTags::Tokens { open: 2, close };
    let digits = || GrammarSource::regex("[0-9]{3}").unwrap();
    let grammar = lab
        .compile(digits().after_reasoning(tags, ReasoningStart::Opened))
        .await
        .unwrap();
    for number in 0..8 {
        let mut request = lab.request(number, Some(grammar.clone()));
        request.sampling.logit_bias = vec![(close, 5.0)];
        let answer = lab.answer(request).await;
        assert_eq!(answer.reason, Some(FinishReason::Stop), "{answer:?}");
        let after = answer
            .tokens
            .iter()
            .position(|token| *token == close)
            .unwrap();
        assert!(!answer.tokens[after + 1..].contains(&close), "{answer:?}");
        let bytes = answer.tokens[after + 1..answer.tokens.len() - 1].iter();
        let bytes = bytes.flat_map(|token| lab.tokenizer.token_bytes(*token));
        let text = String::from_utf8(bytes.copied().collect()).unwrap();
        let text = text.trim_start_matches('\n');
        assert!(text.len() == 3 && text.parse::<u32>().is_ok(), "{answer:?}");
    }
    // The closing tag is text.
    let grammar = digits().after_reasoning(ReasoningTags::Text, ReasoningStart::Opened);
    let grammar = lab.compile(grammar).await.unwrap();
    for (text, is_accepted) in [
        ("so < 4 </ think> \"x\"</think>\n\n123", true),
        ("</think>123", true),
        ("why</think>\n12", false),
        ("why</think>\n\n\n123", false),
        ("123", false),
        ("a</think>b</think>123", false),
    ] {
        assert_eq!(lab.accepts(&grammar, text), is_accepted, "{text:?}");
    }
    let grammar = digits().after_reasoning(ReasoningTags::Text, ReasoningStart::Possible);
    let grammar = lab.compile(grammar).await.unwrap();
    for (text, is_accepted) in [
        ("123", true),
        ("<think>so < 4 </ think></think>\n\n123", true),
        ("\n<think></think>123", true),
        ("<think>123", false),
        ("so</think>123", false),
        ("<think></think>12", false),
    ] {
        assert_eq!(lab.accepts(&grammar, text), is_accepted, "{text:?}");
    }
}
