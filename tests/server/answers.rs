//! The demo model answers its held-out questions. None of them is in its training text.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{Server, client, json_of, message, run};

/// The fraction of the held-out questions that must be answered correctly.
const MIN_CORRECT: f64 = 0.85;

#[derive(Deserialize)]
struct HeldOut {
    max_tokens: u32,
    singles: Vec<HeldOutTurn>,
    chats: Vec<HeldOutChat>,
}

#[derive(Deserialize)]
struct HeldOutChat {
    turns: Vec<HeldOutTurn>,
}

#[derive(Clone, Deserialize)]
struct HeldOutTurn {
    question: String,
    /// An answer is correct if it contains all strings of one of these lists, in any case.
    accept: Vec<Vec<String>>,
}

impl HeldOutTurn {
    fn accepts(&self, answer: &str) -> bool {
        let answer = answer.to_lowercase();
        self.accept
            .iter()
            .any(|all| all.iter().all(|part| answer.contains(part.as_str())))
    }
}

fn held_out() -> HeldOut {
    serde_json::from_str(include_str!("../../benches/training/heldout.json")).unwrap()
}

#[tokio::test]
async fn the_demo_model_answers_held_out_questions() {
    let held_out = held_out();
    assert!(held_out.singles.len() >= 200 && held_out.chats.len() >= 20);
    let server =
        Arc::new(Server::start(&["--max-queued", "1000", "--max-queued-seconds", "600"]).await);
    let answers: Vec<_> = held_out
        .singles
        .into_iter()
        .map(|turn| {
            let server = Arc::clone(&server);
            tokio::spawn(async move {
                let question = [message("user", &turn.question)];
                let answer = server.answer(&question, held_out.max_tokens).await;
                (turn.accepts(&answer), turn.question, answer)
            })
        })
        .collect();
    let total = answers.len();
    let mut correct = 0;
    for answer in answers {
        let (is_correct, question, answer) = answer.await.unwrap();
        correct += usize::from(is_correct);
        if !is_correct {
            println!("wrong: {question:?} -> {answer:?}");
        }
    }
    println!("{correct} of {total} held-out questions");
    assert!(
        correct as f64 >= MIN_CORRECT * total as f64,
        "only {correct} of {total}"
    );
}

/// The fraction that must be answered correctly in blocks.
const MIN_CORRECT_IN_BLOCKS: f64 = 0.8;

#[tokio::test]
async fn the_demo_model_answers_held_out_questions_by_diffusion() {
    let questions: Vec<_> = held_out().singles.into_iter().step_by(4).collect();
    let server = Server::start(&["--decoding", "diffusion"]).await;
    let mut correct = 0;
    for turn in &questions {
        let question = [message("user", &turn.question)];
        correct += usize::from(turn.accepts(&server.answer(&question, 64).await));
    }
    let total = questions.len();
    assert!(
        correct as f64 >= MIN_CORRECT_IN_BLOCKS * total as f64,
        "only {correct} of {total}"
    );
    let metrics = client::text(server.get("/metrics").await).await;
    let value = |name: &str| {
        let line = metrics.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.rsplit(' ').next());
        value.unwrap().parse::<f64>().unwrap()
    };
    let [passes, tokens] = [
        "sterna_block_passes_total{",
        "sterna_unmasked_tokens_total{",
    ]
    .map(value);
    assert!(tokens > 2.0 * passes, "{tokens} tokens in {passes} passes");
}

/// Returns a request that asks a model for the capital of France.
fn body(model: &str, fields: Value) -> Value {
    let mut body = json!({
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    });
    body.as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_block_ends_within_the_context_and_a_name_may_end_as_a_choice_does() {
    let path = "/v1/chat/completions";
    let name = "own:diffusion";
    let flags = ["--max-model-len", "70", "--served-model-name", name];
    let odd = Server::start(&flags).await;
    for model in [name, "own:diffusion:diffusion"] {
        let answer = odd.post(path, &body(model, json!({}))).await;
        let answer = json_of(answer).await;
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
    }
    let fields = json!({"max_tokens": 55});
    let refused = odd
        .post(path, &body("own:diffusion:diffusion", fields))
        .await;
    let message = json_of(refused).await["error"]["message"].to_string();
    assert!(message.contains("64 tokens"), "{message}");
}

#[tokio::test]
async fn a_model_s_name_chooses_the_way_of_decoding() {
    let server = Server::start(&[]).await;
    let models = json_of(server.get("/v1/models").await).await;
    let names: Vec<_> = (0..2).map(|at| models["data"][at]["id"].clone()).collect();
    assert_eq!(names, ["sterna-demo", "sterna-demo:diffusion"]);
    let plain = json!({"logprobs": true});
    let path = "/v1/chat/completions";
    let answer = server
        .post(path, &body("sterna-demo:diffusion", plain))
        .await;
    let answer = json_of(answer).await;
    let choice = &answer["choices"][0];
    assert_eq!(
        choice["message"]["content"],
        "The capital of France is Paris."
    );
    assert_eq!(choice["finish_reason"], "stop");
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    let completion = answer["usage"]["completion_tokens"].as_u64().unwrap();
    assert_eq!(entries.len() as u64 + 1, completion, "and the stop token");
    assert!(
        entries
            .iter()
            .all(|entry| entry["logprob"].as_f64().unwrap() <= 0.0)
    );
    for (tokens, reason) in [(3, "length"), (40, "stop")] {
        let fields = json!({"max_tokens": tokens, "stop": [" is"]});
        let answer = server.post(path, &body("default:diffusion", fields)).await;
        let choice = json_of(answer).await["choices"][0].clone();
        assert_eq!(choice["finish_reason"], reason, "{choice}");
    }
    for (model, fields, param) in [
        (
            "sterna-demo:diffusion",
            json!({"response_format": {"type": "json_object"}}),
            "response_format",
        ),
        ("sterna-demo:other", json!({}), "model"),
    ] {
        let refused = server.post(path, &body(model, fields)).await;
        let error = json_of(refused).await;
        assert_eq!(error["error"]["param"], param, "{error}");
    }
    let fields = json!({"response_format": {"type": "json_object"}, "max_tokens": 8});
    let answer = server
        .post(path, &body("sterna-demo:autoregressive", fields))
        .await;
    assert!(json_of(answer).await["choices"][0].is_object());
}

#[tokio::test]
async fn the_demo_model_answers_held_out_chats() {
    let held_out = held_out();
    let server = Server::start(&[]).await;
    let (mut correct, mut total) = (0, 0);
    for chat in held_out.chats {
        assert_eq!(chat.turns.len(), 3);
        let mut messages = Vec::new();
        for turn in chat.turns {
            messages.push(message("user", &turn.question));
            let answer = server.answer(&messages, held_out.max_tokens).await;
            total += 1;
            correct += usize::from(turn.accepts(&answer));
            if !turn.accepts(&answer) {
                println!("wrong: {:?} -> {answer:?}", turn.question);
            }
            messages.push(message("assistant", &answer));
        }
    }
    println!("{correct} of {total} turns");
    assert!(
        correct as f64 >= MIN_CORRECT * f64::from(total),
        "only {correct} of {total}"
    );
}

#[tokio::test]
async fn eight_bit_keys_and_values_hold_more_tokens_and_answer_questions() {
    let questions = held_out().singles.into_iter().step_by(24);
    let questions: Vec<HeldOutTurn> = questions.collect();
    for (dtype, pages) in [
        ("f16", 682),
        ("int8", 1285),
        ("fp8_e4m3", 1285),
        ("bf16", 682),
    ] {
        let flags = [
            "--threads",
            "1",
            "--kv-memory",
            "16MiB",
            "--kv-dtype",
            dtype,
        ];
        let server = Server::start(&flags).await;
        let metrics = client::text(server.get("/metrics").await).await;
        // A page takes 12 heads · 16 tokens · 2 · 32 values, and 64 bytes of scales a head.
        assert!(
            metrics.contains(&format!("num_gpu_blocks=\"{pages}\"")),
            "{metrics}"
        );
        assert!(
            metrics.contains(&format!("cache_dtype=\"{dtype}\"")),
            "{metrics}"
        );
        let mut correct = 0;
        for turn in &questions {
            let question = [message("user", &turn.question)];
            correct += usize::from(turn.accepts(&server.answer(&question, 64).await));
        }
        let least = MIN_CORRECT * questions.len() as f64 - 1.0;
        assert!(
            correct as f64 >= least,
            "{dtype}: {correct} of {}",
            questions.len()
        );
        assert_eq!(server.terminate().code(), Some(0));
    }
    let refused = run(&["--kv-dtype", "int4"]);
    let error = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        error.contains("int4") && error.contains("fp8_e5m2"),
        "{error}"
    );
}

#[tokio::test]
async fn a_second_turn_finds_the_first_in_the_prefix_cache() {
    let server = Server::start(&[]).await;
    let mut messages = vec![message("user", "Tell me a story about a fox, please.")];
    let first = server.answer(&messages, 200).await;
    messages.push(message("assistant", &first));
    messages.push(message("user", "What is the capital of France?"));
    let usage = server.chat(&messages, 16).await["usage"].clone();
    let cached = usage["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap();
    assert!(cached >= 16, "{usage}");
}
