//! Log-probabilities in the shapes of both endpoints.

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::harness::*;

#[tokio::test]
async fn chat_logprobs_have_openais_shape() {
    let server = Server::new();
    let body = json!({"max_tokens": 30, "logprobs": true, "top_logprobs": 2});
    let whole = server.chat(body.clone()).await.ok();
    let entries = whole["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
        .clone();
    assert_eq!(entries.len(), 30);
    for entry in &entries {
        let keys: HashSet<&str> = entry
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        assert_eq!(
            keys,
            HashSet::from(["token", "logprob", "bytes", "top_logprobs"])
        );
        let top = entry["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        assert_eq!(
            (&top[0]["token"], &top[0]["logprob"]),
            (&entry["token"], &entry["logprob"])
        );
        assert!(
            (-0.1..=0.0).contains(&entry["logprob"].as_f64().unwrap()),
            "{entry}"
        );
        assert!(
            (top[0]["logprob"].as_f64().unwrap() - top[1]["logprob"].as_f64().unwrap() - 6.0).abs()
                < 1e-3
        );
    }
    let bytes = entries
        .iter()
        .flat_map(|entry| entry["bytes"].as_array().unwrap());
    let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
    assert_eq!(
        String::from_utf8_lossy(&bytes),
        whole["choices"][0]["message"]["content"].as_str().unwrap()
    );

    let events = server
        .chat(merged(body, json!({"stream": true})))
        .await
        .events();
    let of_event = |event: &Value| {
        event["choices"][0]["logprobs"]["content"]
            .as_array()
            .cloned()
            .unwrap_or_default()
    };
    let streamed: Vec<Value> = events.iter().flat_map(of_event).collect();
    assert_eq!(streamed, entries);

    let bare = server
        .chat(json!({"max_tokens": 3, "logprobs": true}))
        .await
        .ok();
    assert_eq!(
        bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"],
        json!([])
    );
}

#[tokio::test]
async fn completion_logprobs_have_openais_shape() {
    let server = Server::new();
    for (body, top) in [
        (json!({"logprobs": 0}), 1),
        (json!({"logprobs": 3}), 3),
        (json!({"logprobs": 1, "stop": "two"}), 1),
    ] {
        let body = merged(json!({"max_tokens": 60}), body);
        let whole = server.complete(body.clone()).await.ok();
        let choice = &whole["choices"][0];
        let logprobs = &choice["logprobs"];
        let array = |name: &str| logprobs[name].as_array().unwrap();
        let text: Vec<char> = choice["text"].as_str().unwrap().chars().collect();
        assert!(!array("tokens").is_empty());
        for name in ["token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(array(name).len(), array("tokens").len(), "{name}");
        }
        for (index, token) in array("tokens").iter().enumerate() {
            let token = token.as_str().unwrap();
            let offset = array("text_offset")[index].as_u64().unwrap() as usize;
            assert!(
                offset < text.len(),
                "a token starts after the end of the text"
            );
            let rest: String = text[offset..].iter().collect();
            assert!(
                token.starts_with("bytes:\\x")
                    || rest.starts_with(token)
                    || token.starts_with(&rest),
                "{token:?} {rest:?}"
            );
            let likely = array("top_logprobs")[index].as_object().unwrap();
            assert_eq!(likely.len(), top);
            assert_eq!(
                likely.keys().next().unwrap(),
                token,
                "greedy sampling takes the most likely token"
            );
            assert_eq!(likely[token], array("token_logprobs")[index]);
        }
        let events = server
            .complete(merged(body, json!({"stream": true})))
            .await
            .events();
        let tokens = |event: &Value| {
            event["choices"][0]["logprobs"]["tokens"]
                .as_array()
                .cloned()
                .unwrap_or_default()
        };
        assert_eq!(
            events.iter().flat_map(tokens).collect::<Vec<_>>(),
            *array("tokens")
        );
    }
}
