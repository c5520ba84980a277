//! What the render endpoints say the engine would get is what it gets.

use serde_json::{Value, json};

use crate::harness::*;
use crate::{CHAT, TEXT};

async fn render(server: &Server, path: &str, body: &Value) -> Value {
    server.post(&format!("{path}/render"), body).await.ok()
}

#[tokio::test]
async fn a_rendered_conversation_has_the_tokens_that_the_engine_gets() {
    let server = Server::new();
    let user = |text: &str| json!({"role": "user", "content": text});
    let long = "Grüße, 你好! ".repeat(120); // Parsed on another thread than a small body.
    for messages in [
        json!([user("Hello!")]),
        json!([user("</s><|im_start|>system")]),
        json!([{"role": "system", "content": "Be brief."}, user("a"), {"role": "assistant",
               "content": "b"}, user(&long)]),
    ] {
        for more in [
            json!({}),
            json!({"truncate_prompt_tokens": 7}),
            json!({"add_generation_prompt": false, "stream": true}),
        ] {
            let body = merged(json!({"messages": messages, "max_tokens": 2}), more);
            let rendered = render(&server, CHAT, &body).await;
            let real = json!({"return_token_ids": true, "stream": false});
            let real = server.post(CHAT, &merged(body.clone(), real)).await.ok();
            assert_eq!(rendered["token_ids"], real["prompt_token_ids"], "{body}");
            assert_eq!(rendered["model"], real["model"]);
            assert_eq!(rendered["stream"], body["stream"] == true);
        }
    }
}

#[tokio::test]
async fn rendered_prompts_have_the_tokens_that_the_engine_gets() {
    let server = Server::new();
    for prompt in [
        json!("Hello"),
        json!(["Hello", "</s>", "naïve 👩\u{200d}👧"]),
        json!([[1, 5, 6], [7]]),
        json!([5, 6, 7]),
    ] {
        for more in [
            json!({}),
            json!({"add_special_tokens": false}),
            json!({"n": 2}),
        ] {
            let body = merged(json!({"prompt": prompt, "max_tokens": 2}), more);
            let rendered = render(&server, TEXT, &body).await;
            let real = json!({"return_token_ids": true});
            let real = server.post(TEXT, &merged(body.clone(), real)).await.ok();
            let tokens = |list: &Value, field: &str| -> Vec<Value> {
                list.as_array()
                    .unwrap()
                    .iter()
                    .map(|one| one[field].clone())
                    .collect()
            };
            let mut sent = tokens(&real["choices"], "prompt_token_ids");
            sent.dedup(); // The choices of a prompt have the same.
            assert_eq!(tokens(&rendered, "token_ids"), sent, "{body}");
        }
    }
}

#[tokio::test]
async fn rendered_parameters_are_those_of_the_request_and_the_model() {
    let server = Server::new();
    let body = json!({
        "prompt": "Hello", "temperature": 0.5, "top_p": 0.75, "top_k": 3, "min_p": 0.25,
        "seed": 7, "stop": "x", "stop_token_ids": [9], "max_completion_tokens": 12, "logprobs": 2,
        "n": 3, "frequency_penalty": 1.5,
    });
    let rendered = render(&server, TEXT, &body).await;
    let params = &rendered[0]["sampling_params"];
    for name in [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "n",
        "frequency_penalty",
    ] {
        assert_eq!(params[name], body[name], "{name}");
    }
    assert_eq!(params["max_tokens"], 12);
    assert_eq!(params["stop"], json!(["x"]));
    assert_eq!(params["stop_token_ids"], json!([9, 1, END_OF_TURN]));
    assert_eq!(params["logprobs"], 2);
    let chat = json!({"messages": [{"role": "user", "content": "Hello"}]});
    let rendered = render(&server, CHAT, &chat).await;
    let left = MAX_MODEL_LEN as usize - rendered["token_ids"].as_array().unwrap().len();
    assert_eq!(rendered["sampling_params"]["max_tokens"], left);
}

#[tokio::test]
async fn what_cannot_run_cannot_be_rendered() {
    let server = Server::new();
    for (path, body, param) in [
        (TEXT, json!({"prompt": "a", "top_p": 2}), "top_p"),
        (TEXT, json!({"prompt": [VOCABULARY]}), "prompt"),
        (CHAT, json!({"messages": []}), "messages"),
    ] {
        let real = server.post(path, &body).await;
        let rendered = server.post(&format!("{path}/render"), &body).await;
        assert_eq!(rendered.error().2.as_deref(), Some(param));
        assert_eq!((rendered.status, &rendered.body), (real.status, &real.body));
    }
}
