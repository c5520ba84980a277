//! SGLang's `/generate` and llama-server's `/completion`: the same tokens as `/v1/completions`.

use axum::http::Method;
use serde_json::{Value, json};

use crate::TEXT;
use crate::harness::*;

const LLAMA: &str = "/completion";
const SGLANG: &str = "/generate";

/// Returns the objects of a stream.
fn frames(answer: &Answer, has_done: bool) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.header("content-type"), "text/event-stream");
    let frames = answer.body.strip_suffix("\n\n").unwrap().split("\n\n");
    let data = frames.map(|frame| frame.strip_prefix("data: ").unwrap());
    let mut data: Vec<&str> = data.collect();
    assert_eq!(data.last() == Some(&"[DONE]"), has_done);
    data.retain(|data| *data != "[DONE]");
    data.into_iter()
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

#[tokio::test]
async fn both_say_what_completions_says() {
    let server = Server::new();
    for prompt in [json!("Hello, 你好"), json!([5, 6, 7])] {
        for sampling in [
            json!({"temperature": 0}),
            json!({"temperature": 1.5, "seed": 7, "top_p": 0.9, "top_k": 40, "min_p": 0.001}),
            json!({"temperature": 0, "stop": ["o"], "presence_penalty": 0.5}),
        ] {
            let real = merged(
                sampling.clone(),
                json!({"prompt": prompt, "max_tokens": 40,
                "return_token_ids": true}),
            );
            let real = server.post(TEXT, &real).await.ok();
            let (real, usage) = (&real["choices"][0], &real["usage"]);
            let body = merged(
                sampling.clone(),
                json!({"prompt": prompt, "n_predict": 40,
                "return_tokens": true}),
            );
            let llama = server.post(LLAMA, &body).await.ok();
            assert_eq!(llama["content"], real["text"], "{body}");
            assert_eq!(llama["tokens"], real["token_ids"]);
            assert_eq!(llama["tokens_predicted"], usage["completion_tokens"]);
            assert_eq!(llama["tokens_evaluated"], usage["prompt_tokens"]);
            let is_stopped = real["finish_reason"] == "stop";
            assert_eq!(
                llama["stop_type"],
                if is_stopped { "word" } else { "limit" }
            );
            assert_eq!(llama["stopping_word"], if is_stopped { "o" } else { "" });
            let field = if prompt.is_string() {
                "text"
            } else {
                "input_ids"
            };
            let params = merged(sampling, json!({"max_new_tokens": 40}));
            let body = json!({field: prompt, "sampling_params": params});
            let sglang = server.post(SGLANG, &body).await.ok();
            assert_eq!(sglang["text"], real["text"], "{body}");
            assert_eq!(sglang["output_ids"], real["token_ids"]);
            let info = &sglang["meta_info"];
            assert_eq!(info["completion_tokens"], usage["completion_tokens"]);
            assert_eq!(info["finish_reason"]["type"], real["finish_reason"]);
        }
    }
}

#[tokio::test]
async fn a_stream_says_what_a_whole_answer_says() {
    let server = Server::new();
    let body = json!({"prompt": "Hello", "n_predict": 30, "temperature": 0, "n_probs": 2});
    let whole = server.post(LLAMA, &body).await.ok();
    let body = merged(body, json!({"stream": true}));
    let events = frames(&server.post(LLAMA, &body).await, false);
    let (last, chunks) = events.split_last().unwrap();
    let text: String = chunks
        .iter()
        .map(|chunk| chunk["content"].as_str().unwrap())
        .collect();
    assert_eq!(text, whole["content"].as_str().unwrap());
    assert!(chunks.len() > 1 && chunks.iter().all(|chunk| chunk["stop"] == false));
    assert_eq!(
        (&last["stop"], &last["content"]),
        (&json!(true), &json!(""))
    );
    assert_eq!(last["tokens_predicted"], 30);
    let tokens: usize = chunks
        .iter()
        .map(|chunk| chunk["tokens"].as_array().unwrap().len())
        .sum();
    assert_eq!(tokens, 30);
    let probabilities = |events: &[Value]| -> Vec<Value> {
        let each = events
            .iter()
            .map(|event| event["completion_probabilities"].as_array());
        each.flat_map(|list| list.unwrap().clone()).collect()
    };
    let all = probabilities(&[whole]);
    assert_eq!((all.len(), probabilities(&events)), (30, all.clone()));
    assert_eq!(all[0]["top_logprobs"].as_array().unwrap().len(), 2);

    let body = json!({"text": "Hello", "rid": "mine",
        "sampling_params": {"max_new_tokens": 30, "temperature": 0}});
    let whole = server.post(SGLANG, &body).await.ok();
    let body = merged(body, json!({"stream": true}));
    let events = frames(&server.post(SGLANG, &body).await, true);
    let last = events.last().unwrap();
    assert_eq!(
        (&last["text"], &last["output_ids"]),
        (&whole["text"], &whole["output_ids"])
    );
    assert_eq!(last["meta_info"]["id"], "mine");
    let texts: Vec<&str> = events
        .iter()
        .map(|event| event["text"].as_str().unwrap())
        .collect();
    assert!(
        texts.windows(2).all(|two| two[1].starts_with(two[0])),
        "each has the text so far"
    );
    assert_eq!(
        last["meta_info"]["finish_reason"],
        json!({"type": "length", "length": 30})
    );
}

#[tokio::test]
async fn a_stop_token_and_log_probabilities_are_reported() {
    let server = Server::new();
    let script = server.tokenizer.encode_prompt(SCRIPT).unwrap();
    let stop = script[4];
    let body = json!({"prompt": [5], "stop_token_ids": [stop], "temperature": 0});
    let llama = server.post(LLAMA, &body).await.ok();
    assert_eq!(
        (&llama["stop_type"], &llama["tokens"]),
        (&json!("eos"), &json!([]))
    );
    let params = json!({"stop_token_ids": [stop], "temperature": 0});
    let body = json!({"input_ids": [5], "sampling_params": params, "return_logprob": true,
        "top_logprobs_num": 1, "return_text_in_logprobs": true});
    let answer = server.post(SGLANG, &body).await.ok();
    let info = &answer["meta_info"];
    assert_eq!(
        info["finish_reason"],
        json!({"type": "stop", "matched": stop})
    );
    let scored = info["output_token_logprobs"].as_array().unwrap();
    assert!(!scored.is_empty());
    for (entry, top) in scored
        .iter()
        .zip(info["output_top_logprobs"].as_array().unwrap())
    {
        assert_eq!(entry, &top[0], "the script's token is the most likely one");
        assert!(entry[0].as_f64() < Some(0.0) && entry[2].is_string());
    }
}

#[tokio::test]
async fn the_stop_string_that_ended_an_answer_is_named() {
    let server = Server::new();
    for (stop, named) in [
        (json!(["never said", "three"]), "three"),
        (json!(["o", "tw"]), "tw"),
        (json!(["e th", "e t", "naïve"]), "e t"),
    ] {
        let body = json!({"prompt": "Hello", "stop": stop, "temperature": 0, "n_predict": 60});
        let llama = server.post(LLAMA, &body).await.ok();
        let stopped = (&llama["stop_type"], &llama["stopping_word"]);
        assert_eq!(stopped, (&json!("word"), &json!(named)), "{llama}");
        let streamed = merged(body, json!({"stream": true}));
        let events = frames(&server.post(LLAMA, &streamed).await, false);
        assert_eq!(events.last().unwrap()["stopping_word"], named);
        let params = json!({"stop": stop, "temperature": 0, "max_new_tokens": 60});
        let body = json!({"text": "Hello", "sampling_params": params});
        let sglang = server.post(SGLANG, &body).await.ok();
        assert_eq!(
            sglang["meta_info"]["finish_reason"],
            json!({"type": "stop", "matched": named})
        );
    }
}

#[tokio::test]
async fn answers_follow_grammars_there_too() {
    let server = Server::new();
    let body = json!({"prompt": "Hello", "grammar": "root ::= \"yes\"", "temperature": 0});
    assert_eq!(server.post(LLAMA, &body).await.ok()["content"], "yes");
    let body = json!({"text": "Hello", "sampling_params": {"regex": "no", "temperature": 0}});
    assert_eq!(server.post(SGLANG, &body).await.ok()["text"], "no");
}

#[tokio::test]
async fn errors_name_the_field() {
    let server = Server::new();
    for (path, body, param) in [
        (LLAMA, json!({}), "prompt"),
        (LLAMA, json!({"prompt": ["a", "b"]}), "prompt"),
        (LLAMA, json!({"prompt": 5}), "prompt"),
        (LLAMA, json!({"prompt": "a", "n_predict": 0}), "n_predict"),
        (LLAMA, json!({"prompt": "a", "n_predict": -2}), "n_predict"),
        (
            LLAMA,
            json!({"prompt": "a", "n_predict": 5000}),
            "n_predict",
        ),
        (LLAMA, json!({"prompt": "a", "n_probs": 21}), "n_probs"),
        (LLAMA, json!({"prompt": "a", "n": 2}), "n"),
        (
            LLAMA,
            json!({"prompt": "a", "prompt_logprobs": 0}),
            "prompt_logprobs",
        ),
        (LLAMA, json!({"prompt": "a", "max_tokens": 0}), "max_tokens"),
        (LLAMA, json!({"prompt": "a", "echo": true}), "echo"),
        (
            LLAMA,
            json!({"prompt": "a", "samplers": ["top_k"]}),
            "samplers",
        ),
        (LLAMA, json!({"prompt": "a", "model": "x"}), "model"),
        (SGLANG, json!({}), "text"),
        (SGLANG, json!({"text": ["a"]}), "text"),
        (SGLANG, json!({"text": "a", "input_ids": [1]}), "input_ids"),
        (SGLANG, json!({"input_ids": [VOCABULARY]}), "input_ids"),
        (SGLANG, json!({"input_ids": []}), "input_ids"),
        (
            SGLANG,
            json!({"text": "a", "image_data": "x"}),
            "image_data",
        ),
        (
            SGLANG,
            json!({"text": "a", "logprob_start_len": 0}),
            "logprob_start_len",
        ),
        (SGLANG, json!({"text": "a", "rid": ""}), "rid"),
        (
            SGLANG,
            json!({"text": "a", "sampling_params": []}),
            "sampling_params",
        ),
        (
            SGLANG,
            json!({"text": "a", "stream": true, "return_logprob": true}),
            "return_logprob",
        ),
    ] {
        let (status, _, found) = server.post(path, &body).await.error();
        assert!(matches!(status, 400 | 404), "{path} {body}");
        assert_eq!(found.as_deref(), Some(param), "{path} {body}");
    }
}

#[tokio::test]
async fn errors_in_sampling_params_name_the_field_by_its_path() {
    let server = Server::new();
    for (params, param) in [
        (json!({"temperature": "hot"}), "sampling_params.temperature"),
        (
            json!({"top_p": 1, "top_p ": 2, "min_p": 7}),
            "sampling_params.min_p",
        ),
        (
            json!({"max_new_tokens": 0}),
            "sampling_params.max_new_tokens",
        ),
        (
            json!({"min_new_tokens": 200}),
            "sampling_params.min_new_tokens",
        ),
        (
            json!({"no_stop_trim": true}),
            "sampling_params.no_stop_trim",
        ),
    ] {
        let body = json!({"text": "a", "sampling_params": params});
        let found = server.post(SGLANG, &body).await.error().2;
        assert_eq!(found.as_deref(), Some(param), "{body}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    let server = Server::new();
    server.gate.close();
    for (path, body) in [
        (LLAMA, json!({"prompt": "a", "stream": true})),
        (
            SGLANG,
            json!({"text": "a", "sampling_params": {"max_new_tokens": 4000}}),
        ),
    ] {
        let json = [("content-type", "application/json")];
        let asking = server.send(Method::POST, path, &json, body.to_string());
        let leaving = server.until("the request runs", |server| {
            server.gate.pass(1);
            server.engine.load().running > 0
        });
        tokio::select! {
            _ = asking => panic!("nothing has ended the answer"),
            () = leaving => {}
        }
        server.gate.open();
        server
            .until("its pages are free", |server| {
                server.engine.load().running == 0
            })
            .await;
        server.gate.close();
    }
}

#[tokio::test]
async fn the_texts_of_control_tokens_become_these_tokens_if_the_client_asks() {
    let server = Server::new();
    let tokens = async |more: Value| {
        let body = merged(json!({"content": "a<|eot_id|>"}), more);
        let answer = server.post("/tokenize", &body).await.ok();
        answer["tokens"].as_array().unwrap().clone()
    };
    let spelled = tokens(json!({})).await;
    assert_eq!(tokens(json!({"parse_special": false})).await, spelled);
    let parsed = tokens(json!({"parse_special": true})).await;
    assert_eq!(*parsed.last().unwrap(), END_OF_TURN);
    assert!(parsed.len() < spelled.len() && !spelled.contains(&json!(END_OF_TURN)));
    let whole = tokens(json!({"parse_special": true, "add_special": true})).await;
    assert_eq!(whole[1..], parsed);
}
