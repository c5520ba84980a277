//! Log-probabilities of prompts: `echo` with `logprobs`, and `prompt_logprobs`.

use serde_json::{Value, json};

use crate::harness::*;

/// Returns the log-probabilities that the actor gives the tokens of a prompt after the first, and
/// their ranks.
fn expected(server: &Server, prompt: &[u32]) -> Vec<(f64, u64)> {
    let script = server.tokenizer.encode_prompt(SCRIPT).unwrap().split_off(1);
    let others = f64::from(VOCABULARY) - 2.0;
    let sum = (12_f64.exp() + 6_f64.exp() + others * (-30_f64).exp()).ln();
    let score = |(position, &token): (usize, &u32)| {
        let said = script[position % script.len()];
        match token {
            token if token == said => (12.0 - sum, 1),
            token if token == (said + 1) % VOCABULARY => (6.0 - sum, 2),
            _ => (-30.0 - sum, 3),
        }
    };
    prompt.iter().enumerate().skip(1).map(score).collect()
}

/// A prompt that follows the script in part.
fn prompt(server: &Server) -> Vec<u32> {
    let script = server.tokenizer.encode_prompt(SCRIPT).unwrap().split_off(1);
    let token = |position: usize| match position % 5 {
        0..3 => script[position % script.len()],
        3 => script[position % script.len()] + 1,
        _ => 20,
    };
    let is_safe = |token: &u32| *token != POISON && *token < VOCABULARY;
    (0..150)
        .map(token)
        .map(|token| Some(token).filter(is_safe).unwrap_or(20))
        .collect()
}

fn is_near(found: &Value, expected: f64) -> bool {
    (found.as_f64().unwrap() - expected).abs() < 1e-4
}

#[tokio::test]
async fn an_echo_has_the_log_probabilities_of_the_prompt() {
    let server = Server::new();
    let prompt = prompt(&server);
    let text = server.tokenizer.decode(&prompt, true);
    let body = json!({"prompt": [prompt], "echo": true, "max_tokens": 1, "logprobs": 1});
    let first = server.complete(body.clone()).await.ok();
    let choice = &first["choices"][0];
    let plain = server
        .complete(json!({"prompt": prompt, "max_tokens": 1}))
        .await
        .ok();
    let said = plain["choices"][0]["text"].as_str().unwrap();
    assert_eq!(choice["text"], format!("{text}{said}"));
    let array = |name: &str| choice["logprobs"][name].as_array().unwrap();
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(array(name).len(), prompt.len() + 1, "{name}");
    }
    assert!(array("token_logprobs")[0].is_null() && array("top_logprobs")[0].is_null());
    for (place, (logprob, rank)) in (1..).zip(expected(&server, &prompt)) {
        let found = &array("token_logprobs")[place];
        assert!(is_near(found, logprob), "place {place}: {found} {logprob}");
        let top = array("top_logprobs")[place].as_object().unwrap();
        let best = top
            .values()
            .map(|value| value.as_f64().unwrap())
            .fold(f64::MIN, f64::max);
        assert_eq!(*found == json!(best), rank == 1, "place {place}: {top:?}");
    }
    assert!(array("token_logprobs")[prompt.len()].as_f64().unwrap() > -0.01);
    let offsets: Vec<u64> = array("text_offset")
        .iter()
        .map(|at| at.as_u64().unwrap())
        .collect();
    assert!(offsets.is_sorted() && offsets[prompt.len()] == text.chars().count() as u64);

    // The pages of the prompt are cached now, but they give no logits.
    let again = server.complete(body.clone()).await.ok();
    assert_eq!(again["choices"], first["choices"]);
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 0);

    let events = server
        .complete(merged(body, json!({"stream": true})))
        .await
        .events();
    let streamed: Vec<Value> = (events.iter())
        .filter_map(|event| {
            event["choices"][0]["logprobs"]["token_logprobs"]
                .as_array()
                .cloned()
        })
        .flatten()
        .collect();
    assert_eq!(json!(streamed), choice["logprobs"]["token_logprobs"]);
    let streamed: String = (events.iter())
        .filter_map(|event| event["choices"][0]["text"].as_str())
        .collect();
    assert_eq!(json!(streamed), choice["text"]);
}

#[tokio::test]
async fn an_echo_without_log_probabilities_uses_the_cache() {
    let server = Server::new();
    let prompt = "one two three ".repeat(20);
    let body = json!({"prompt": [prompt, "b"], "echo": true, "max_tokens": 3, "n": 2});
    for _ in 0..2 {
        let answer = server.complete(body.clone()).await.ok();
        for (index, choice) in answer["choices"].as_array().unwrap().iter().enumerate() {
            let expected = if index < 2 { prompt.as_str() } else { "b" };
            let text = choice["text"].as_str().unwrap();
            assert!(
                text.starts_with(expected) && text.len() > expected.len(),
                "{text}"
            );
            assert!(choice["logprobs"].is_null());
        }
    }
    let again = server.complete(body).await.ok();
    assert!(
        again["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
            > 16
    );
}

#[tokio::test]
async fn prompt_logprobs_have_vllms_shape() {
    let server = Server::new();
    let prompt = prompt(&server);
    let body = json!({"prompt": prompt, "max_tokens": 2, "prompt_logprobs": 2, "n": 2});
    let answer = server.complete(body).await.ok();
    let scores = expected(&server, &prompt);
    for choice in answer["choices"].as_array().unwrap() {
        let entries = choice["prompt_logprobs"].as_array().unwrap();
        assert_eq!(entries.len(), prompt.len());
        assert!(entries[0].is_null() && choice["logprobs"].is_null());
        for (place, (logprob, rank)) in (1..).zip(&scores) {
            let entry = entries[place].as_object().unwrap();
            let own = &entry[&prompt[place].to_string()];
            assert!(is_near(&own["logprob"], *logprob), "place {place}: {own}");
            assert!(*rank == 3 && own["rank"].as_u64() >= Some(3) || own["rank"] == *rank);
            assert_eq!(entry.len(), if *rank == 3 { 3 } else { 2 }, "place {place}");
        }
    }
    let chat = server
        .chat(json!({"max_tokens": 1, "prompt_logprobs": 0}))
        .await
        .ok();
    let entries = chat["prompt_logprobs"].as_array().unwrap();
    assert_eq!(
        entries.len() as u64,
        chat["usage"]["prompt_tokens"].as_u64().unwrap()
    );
    assert_eq!(entries[1].as_object().unwrap().len(), 1);
    for body in [
        json!({"prompt_logprobs": 1, "stream": true}),
        json!({"prompt_logprobs": 21}),
    ] {
        let refused = server.complete(body).await;
        let param = Some("prompt_logprobs".into());
        assert_eq!(refused.error(), (400, "invalid_value".into(), param));
    }
}

#[tokio::test]
async fn a_prompt_is_scored_without_an_output() {
    let server = Server::new();
    let prompt = prompt(&server);
    let text = server.tokenizer.decode(&prompt, true);
    let body = json!({"prompt": [prompt, [20]], "echo": true, "max_tokens": 0, "logprobs": 1});
    let answer = server.complete(body.clone()).await.ok();
    let with_output = merged(body.clone(), json!({"max_tokens": 1}));
    let with_output = server.complete(with_output).await.ok();
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], text);
    assert_eq!(choice["finish_reason"], "length");
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        for (choice, len) in [(0, prompt.len()), (1, 1)] {
            let all = &with_output["choices"][choice]["logprobs"][name];
            let all = all.as_array().unwrap();
            assert_eq!(all.len(), len + 1, "{name}");
            assert_eq!(
                answer["choices"][choice]["logprobs"][name],
                json!(all[..len])
            );
        }
    }
    let tokens = (prompt.len() + 1) as u64;
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    assert_eq!(answer["usage"]["total_tokens"], tokens);

    let streamed = merged(
        body,
        json!({"stream": true, "stream_options": {"include_usage": true}}),
    );
    let events = server.complete(streamed).await.events();
    let of_first = |event: &&Value| event["choices"][0]["index"] == 0;
    let texts: Vec<_> = (events.iter().filter(of_first))
        .map(|event| event["choices"][0]["text"].as_str().unwrap())
        .collect();
    assert_eq!(
        texts,
        [&text, ""],
        "one chunk has the prompt, and one is the end"
    );
    let usage = &events
        .iter()
        .rev()
        .find(|event| event["usage"].is_object())
        .unwrap()["usage"];
    assert_eq!(usage["completion_tokens"], 0);
    assert_eq!(usage["total_tokens"], tokens);
}

#[tokio::test]
async fn an_answer_without_output_is_about_the_prompt_or_refused() {
    let server = Server::new();
    let chat = json!({"max_completion_tokens": 0, "prompt_logprobs": 0});
    let chat = server.chat(chat).await.ok();
    assert_eq!(chat["choices"][0]["message"]["content"], "");
    assert_eq!(chat["usage"]["completion_tokens"], 0);
    let entries = chat["prompt_logprobs"].as_array().unwrap();
    assert_eq!(json!(entries.len()), chat["usage"]["prompt_tokens"]);

    let echo = json!({"prompt": "one two", "echo": true, "max_tokens": 0, "n": 2});
    let echo = server.complete(echo).await.ok();
    for choice in echo["choices"].as_array().unwrap() {
        assert_eq!(
            (&choice["text"], &choice["logprobs"]),
            (&json!("one two"), &Value::Null)
        );
    }
    for field in ["max_tokens", "max_completion_tokens"] {
        let refused = server.complete(json!({"prompt": "a", field: 0})).await;
        assert_eq!(
            refused.error(),
            (400, "invalid_value".into(), Some(field.into()))
        );
        let refused = server.chat(json!({"logprobs": true, field: 0})).await;
        assert_eq!(
            refused.error(),
            (400, "invalid_value".into(), Some(field.into()))
        );
    }
}

/// lm-eval cuts one entry for `max_tokens` from the end of each array.
#[tokio::test]
async fn the_arrays_of_an_echo_have_an_entry_for_a_stop_token() {
    let server = Server::new();
    let prompt = prompt(&server);
    let text = server.tokenizer.decode(&prompt, true);
    let body = json!({"prompt": prompt, "echo": true, "max_tokens": 1, "logprobs": 1,
        "return_token_ids": true});
    let free = server.complete(body.clone()).await.ok();
    let said = &free["choices"][0]["token_ids"];
    let stopped = merged(body, json!({"stop_token_ids": said}));
    for stream in [false, true] {
        let body = merged(stopped.clone(), json!({"stream": stream}));
        let answer = server.complete(body).await;
        let choices: Vec<Value> = match stream {
            false => vec![answer.ok()["choices"][0].clone()],
            true => (answer.events().iter())
                .map(|event| event["choices"][0].clone())
                .collect(),
        };
        let texts = choices.iter().filter_map(|choice| choice["text"].as_str());
        assert_eq!(texts.collect::<String>(), text);
        assert_eq!(choices.last().unwrap()["finish_reason"], "stop");
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let parts = choices
                .iter()
                .filter_map(|choice| choice["logprobs"][name].as_array());
            let entries: Vec<_> = parts.flatten().cloned().collect();
            assert_eq!(
                json!(entries),
                free["choices"][0]["logprobs"][name],
                "{name}"
            );
        }
    }
}

#[tokio::test]
async fn a_request_may_not_ask_for_too_many_log_probabilities_of_prompts() {
    let server = Server::new();
    let prompts = |count: usize| vec![vec![20; 4000]; count];
    let with = |body: Value| merged(json!({"prompt": prompts(8), "max_tokens": 1}), body);
    for (body, param) in [
        (json!({"prompt_logprobs": 16}), "prompt_logprobs"),
        (
            json!({"prompt_logprobs": 20, "echo": true, "logprobs": 1}),
            "prompt_logprobs",
        ),
        (
            json!({"prompt": prompts(4), "n": 2, "prompt_logprobs": 16}),
            "prompt_logprobs",
        ),
    ] {
        let refused = server.complete(with(body)).await;
        assert_eq!(
            refused.error(),
            (400, "invalid_value".into(), Some(param.into()))
        );
    }
    // What does not fit after the truncation alone counts.
    let body = json!({"prompt_logprobs": 16, "truncate_prompt_tokens": 1, "max_tokens": 0});
    server.complete(with(body)).await.ok();
}
