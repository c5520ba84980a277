//! What the server says about itself: to routers in SGLang's shapes, to clients of llama-server,
//! and to clients that need the tokenizer.

use serde_json::{Value, json};

use crate::TEXT;
use crate::harness::*;

#[tokio::test]
async fn the_tokenizer_is_described_by_its_own_files() {
    let server = Server::new();
    let info = server.get("/tokenizer_info").await.ok();
    let files: Value = serde_json::from_slice(CONFIG).unwrap();
    for name in ["tokenizer_class", "bos_token", "eos_token", "chat_template"] {
        assert!(files[name].is_string(), "{name}: {files}");
        assert_eq!(info[name], files[name]);
    }
    assert_eq!(info["model_max_length"], MAX_MODEL_LEN);
    assert_eq!(info["vocab_size"], VOCABULARY);
    // A client that renders the template itself finds the token there.
    let eos = json!({"prompt": info["eos_token"], "add_special_tokens": false});
    assert!(server.post("/tokenize", &eos).await.ok()["count"].as_u64() > Some(0));
}

#[tokio::test]
async fn routers_find_the_model_and_its_limits() {
    let server = Server::new();
    let model = server.get("/model_info").await.ok();
    assert_eq!(server.get("/get_model_info").await.ok(), model);
    assert_eq!(model["model_path"], "actor");
    assert_eq!(model["is_generation"], true);
    assert_eq!(model["architectures"], json!(["BitNetForCausalLM"]));
    assert_eq!(model["preferred_sampling_params"], Value::Null);
    let info = server.get("/server_info").await.ok();
    assert_eq!(server.get("/get_server_info").await.ok(), info);
    assert_eq!(info["served_model_name"], "actor");
    assert_eq!(info["status"], "ready");
    assert_eq!(info["max_total_num_tokens"], 1024 * 16);
    assert_eq!(info["page_size"], 16);
    assert_eq!(info["max_running_requests"], 8);
    assert_eq!(info["context_length"], MAX_MODEL_LEN);
    server.engine.drain();
    assert_eq!(server.get("/server_info").await.ok()["status"], "draining");
}

#[tokio::test]
async fn the_load_counts_running_and_waiting_sequences_and_their_tokens() {
    let server = Server::start(sterna::api::App::loading(), 1, 64);
    let idle = server.get("/v1/loads").await.ok();
    assert_eq!(idle["loads"][0]["num_total_reqs"], 0);
    assert_eq!(idle["loads"][0]["num_used_tokens"], 0);
    server.gate.close();
    let prompts = json!({"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4});
    let (load, short, slots, full, answer) = {
        let asking = server.post(TEXT, &prompts);
        let watching = async {
            server.gate.arrivals(1).await;
            server.gate.pass(1); // The first step publishes the load that it leaves.
            server.gate.arrivals(2).await;
            let load = server.get("/v1/loads?include=core%2Cqueues").await.ok();
            let short = server.get("/get_load").await.ok();
            let slots = server.get("/slots").await.ok();
            let full = server.get("/slots?fail_on_no_slot=1").await;
            server.gate.open();
            (load, short, slots, full)
        };
        let (answer, (load, short, slots, full)) = tokio::join!(asking, watching);
        (load, short, slots, full, answer)
    };
    let load = &load["loads"][0];
    assert_eq!(
        (&load["num_running_reqs"], &load["num_waiting_reqs"]),
        (&json!(1), &json!(1))
    );
    assert_eq!(load["num_waiting_uncached_tokens"], 2);
    assert_eq!(load["num_used_tokens"], 16);
    assert_eq!(load["num_total_tokens"], 18);
    assert_eq!(load["utilization"], 1.0);
    assert_eq!(
        short,
        json!([{"dp_rank": 0, "num_reqs": 2, "num_waiting_reqs": 1, "num_tokens": 18}])
    );
    let slot = json!({"id": 0, "n_ctx": MAX_MODEL_LEN, "is_processing": true});
    assert_eq!(slots, json!([slot]));
    assert_eq!(full.error(), (503, "engine_overloaded".into(), None));
    assert_eq!(answer.ok()["choices"].as_array().unwrap().len(), 2);
    assert_eq!(server.get("/slots?fail_on_no_slot=1").await.status, 200);
}

#[tokio::test]
async fn an_unknown_section_of_the_load_is_an_error() {
    let server = Server::new();
    for sections in [
        "all",
        "core,memory",
        "spec&include=lora",
        "",
        "core&other=x",
    ] {
        let answer = server.get(&format!("/v1/loads?include={sections}")).await;
        let expected = if sections.is_empty() { 400 } else { 200 };
        assert_eq!(answer.status, expected, "{sections}: {}", answer.body);
    }
    let (status, code, param) = server.get("/v1/loads?include=core,secrets").await.error();
    assert_eq!((status, code.as_str()), (400, "invalid_value"));
    assert_eq!(param.as_deref(), Some("include"));
}

#[tokio::test]
async fn clients_of_llama_server_find_context_and_template() {
    let server = Server::new();
    let props = server.get("/props").await.ok();
    assert_eq!(props["default_generation_settings"]["n_ctx"], MAX_MODEL_LEN);
    assert_eq!(
        props["default_generation_settings"]["params"]["temperature"],
        1.0
    );
    assert_eq!(props["total_slots"], 8);
    let info = server.get("/tokenizer_info").await.ok();
    assert_eq!(props["chat_template"], info["chat_template"]);
    let slots = server.get("/slots").await.ok();
    assert_eq!(slots.as_array().unwrap().len(), 8);
    assert!(
        slots
            .as_array()
            .unwrap()
            .iter()
            .all(|slot| slot["is_processing"] == false)
    );
}
