//! `/v1/embeddings`: inputs, formats, usage and errors.

use std::sync::Arc;

use axum::Router;
use axum::http::Method;
use serde_json::{Value, json};
use sterna::api::{self, App, EmbeddingShape, ModelCard, SamplingDefaults, Serving};
use sterna::engine::Pooling;
use sterna::tools::ToolFormat;

use crate::harness::*;
use crate::{CHAT, TEXT};

const PATH: &str = "/v1/embeddings";

/// Returns a router that serves the states of the scripted model as an embedding model's.
fn embedding_router(server: &Server, pooling: Pooling) -> Router {
    let app = App::loading();
    let tokenizer = Arc::clone(&server.tokenizer);
    app.serve(Serving {
        tool_format: ToolFormat::find(None, &tokenizer),
        model: ModelCard {
            name: "embedder".into(),
            max_model_len: MAX_MODEL_LEN - 1,
            vocabulary: VOCABULARY,
            stop_tokens: vec![1],
            embedding: Some(EmbeddingShape {
                pooling,
                dimensions: 2,
            }),
            ..ModelCard::default()
        },
        grammars: grammars::start(&tokenizer, &[1]),
        tokenizer,
        chat_template: None,
        defaults: SamplingDefaults::default(),
        engine: server.engine.clone(),
        metrics: server.metrics.clone(),
    });
    api::router(app)
}

async fn post(router: &Router, path: &str, body: Value) -> Answer {
    let json = [("content-type", "application/json")];
    send(router, Method::POST, path, &json, body.to_string()).await
}

/// Returns the embedding of `tokens` tokens: the scripted states are the next tokens of the script.
fn expected(server: &Server, tokens: usize, pooling: Pooling) -> Vec<f32> {
    let script = server.tokenizer.encode_prompt(SCRIPT).unwrap().split_off(1);
    let state = |position: usize| f64::from(script[(position + 1) % script.len()]);
    let (sum, count) = match pooling {
        Pooling::LastToken => (state(tokens - 1), 1.0),
        Pooling::Mean => ((0..tokens).map(state).sum(), tokens as f64),
    };
    let length = (sum * sum + (100.0 * count) * (100.0 * count)).sqrt();
    vec![(sum / length) as f32, (100.0 * count / length) as f32]
}

fn numbers(embedding: &Value) -> Vec<f32> {
    let values = embedding.as_array().unwrap().iter();
    values.map(|value| value.as_f64().unwrap() as f32).collect()
}

fn is_near(got: &[f32], wanted: &[f32]) -> bool {
    got.len() == wanted.len()
        && got
            .iter()
            .zip(wanted)
            .all(|(got, wanted)| (got - wanted).abs() < 1e-6)
}

#[tokio::test]
async fn each_input_has_its_embedding_whatever_its_form_and_length() {
    let server = Server::new();
    for pooling in [Pooling::LastToken, Pooling::Mean] {
        let router = embedding_router(&server, pooling);
        let lengths = [1, 16, 17, 200, 700]; // A step computes 512 tokens, and 64 states of means.
        let inputs: Vec<Vec<u32>> = lengths.iter().map(|length| vec![5; *length]).collect();
        let answer = post(&router, PATH, json!({"input": inputs})).await.ok();
        for (index, length) in lengths.into_iter().enumerate() {
            let object = &answer["data"][index];
            assert_eq!(object["index"], index);
            let wanted = expected(&server, length, pooling);
            let got = numbers(&object["embedding"]);
            assert!(
                is_near(&got, &wanted),
                "{pooling:?} {length}: {got:?} {wanted:?}"
            );
            let alone = post(&router, PATH, json!({"input": inputs[index]}))
                .await
                .ok();
            assert_eq!(alone["data"][0]["embedding"], object["embedding"]);
        }
        let total: usize = lengths.iter().sum();
        assert_eq!(
            answer["usage"],
            json!({"prompt_tokens": total, "total_tokens": total})
        );
        assert_eq!(answer["model"], "embedder");
        let text = post(&router, PATH, json!({"input": "Hello"})).await.ok();
        let texts = post(&router, PATH, json!({"input": ["Hello", "Hello"]}))
            .await
            .ok();
        assert_eq!(text["data"][0]["embedding"], texts["data"][1]["embedding"]);
    }
    assert_eq!(server.engine.load().running, 0);
    assert_eq!(server.metric("vllm:generation_tokens_total"), 0.0);
}

#[tokio::test]
async fn base64_has_the_bits_of_the_numbers() {
    let server = Server::new();
    let router = embedding_router(&server, Pooling::LastToken);
    let numbers = numbers(
        &post(&router, PATH, json!({"input": [5, 6], "dimensions": 2}))
            .await
            .ok()["data"][0]["embedding"],
    );
    let body = json!({"input": [5, 6], "encoding_format": "base64"});
    let answer = post(&router, PATH, body).await.ok();
    let text = answer["data"][0]["embedding"].as_str().unwrap();
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let bits = text.bytes().filter(|byte| *byte != b'=').map(digit);
    let bits: String = bits.map(|digit| format!("{digit:06b}")).collect();
    let bytes: Vec<u8> = (0..8)
        .map(|byte| u8::from_str_radix(&bits[8 * byte..8 * byte + 8], 2).unwrap())
        .collect();
    let read = bytes
        .chunks_exact(4)
        .map(|four| f32::from_le_bytes(four.try_into().unwrap()));
    assert_eq!(read.collect::<Vec<_>>(), numbers);
}

#[tokio::test]
async fn errors_name_the_field_and_each_model_does_what_it_can() {
    let server = Server::new();
    let router = embedding_router(&server, Pooling::LastToken);
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": 5}), "input"),
        (json!({"input": ["a", 5]}), "input[1]"),
        (json!({"input": [VOCABULARY]}), "input"),
        (
            json!({"input": [[5], vec![5; MAX_MODEL_LEN as usize]]}),
            "input[1]",
        ),
        (json!({"input": vec!["a"; 2049]}), "input"),
        (
            json!({"input": "a", "encoding_format": "int8"}),
            "encoding_format",
        ),
        (json!({"input": "a", "dimensions": 3}), "dimensions"),
        (json!({"input": "a", "model": "x"}), "model"),
    ] {
        let (status, _, found) = post(&router, PATH, body.clone()).await.error();
        assert!(matches!(status, 400 | 404), "{body}");
        assert_eq!(found.as_deref(), Some(param), "{body}");
    }
    let unsupported = |param: &str| {
        (
            400,
            "unsupported_parameter".to_owned(),
            Some(param.to_owned()),
        )
    };
    for path in [TEXT, "/completion"] {
        let refused = post(&router, path, json!({"prompt": "a"})).await;
        assert_eq!(refused.error(), unsupported("model"), "{path}");
    }
    let refused = server.post(PATH, &json!({"input": "a"})).await;
    assert_eq!(refused.error(), unsupported("model"));
    assert_eq!(
        server.post(CHAT, &json!({"messages": []})).await.status,
        400
    );
}

#[tokio::test]
async fn embeddings_share_steps_with_answers_and_neither_changes() {
    let server = Server::new();
    let router = embedding_router(&server, Pooling::Mean);
    let alone = post(&router, PATH, json!({"input": vec![5; 300]}))
        .await
        .ok();
    let answer = server.complete(json!({"max_tokens": 60})).await.ok();
    let (embedding, together) = tokio::join!(
        post(&router, PATH, json!({"input": vec![5; 300]})),
        server.complete(json!({"max_tokens": 60}))
    );
    assert_eq!(embedding.ok()["data"], alone["data"]);
    assert_eq!(together.ok()["choices"], answer["choices"]);
}

/// LangChain sends a thousand texts at once.
#[tokio::test]
async fn a_request_may_have_a_thousand_inputs() {
    let server = Server::new();
    let router = embedding_router(&server, Pooling::LastToken);
    let answer = post(&router, PATH, json!({"input": vec!["a b"; 1000]}))
        .await
        .ok();
    let data = answer["data"].as_array().unwrap();
    assert_eq!(data.len(), 1000);
    assert!(
        (0..)
            .zip(data)
            .all(|(index, object)| object["index"] == index)
    );
    let one = post(&router, PATH, json!({"input": "a b"})).await.ok();
    assert_eq!(data[999]["embedding"], one["data"][0]["embedding"]);
    let tokens = one["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(answer["usage"]["prompt_tokens"], 1000 * tokens);
    let (status, _, param) = post(&router, PATH, json!({"input": vec!["a"; 2049]}))
        .await
        .error();
    assert_eq!((status, param.as_deref()), (400, Some("input")));
}
