//! Checkpoints that the program serves or refuses.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::{Server, json_of, message, run};

/// A directory with the demo model and recorded tokens, removed on drop.
struct GoldenCheckpoint(PathBuf);

impl GoldenCheckpoint {
    /// The small model of Qwen 2 as one of Fast-dLLM v2. Only its tokenizer knows the mask token.
    /// Each `test` has a directory of its own.
    fn fast_dllm(test: &str) -> GoldenCheckpoint {
        let name = format!("sterna-fast-dllm-{}-{test}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir(&directory).unwrap();
        let checkpoint = GoldenCheckpoint(directory);
        let source = fixture("qwen2-group64");
        for file in [
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
        ] {
            fs::copy(source.join(file), checkpoint.0.join(file)).unwrap();
        }
        let text = fs::read(source.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&text).unwrap();
        config["architectures"] = json!(["Fast_dLLM_QwenForCausalLM"]);
        config["model_type"] = json!("Fast_dLLM_Qwen");
        config["bd_size"] = json!(16);
        fs::write(checkpoint.0.join("config.json"), config.to_string()).unwrap();
        let added = json!({"|<MASK>|": 300}).to_string();
        fs::write(checkpoint.0.join("added_tokens.json"), added).unwrap();
        checkpoint
    }

    fn new(tokens: &[u32]) -> GoldenCheckpoint {
        let name = format!("sterna-golden-{}-{}", std::process::id(), tokens[0]);
        let directory = std::env::temp_dir().join(name);
        fs::create_dir(&directory).unwrap();
        let checkpoint = GoldenCheckpoint(directory);
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/demo");
        for file in [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            fs::copy(demo.join(file), checkpoint.0.join(file)).unwrap();
        }
        let prompt = [2040, 286, 257, 1186, 357, 298, 30, 2042, 284, 257];
        let case = json!({"prompt_tokens": prompt, "tokens": tokens});
        let golden = json!({"version": 1, "cases": [case]}).to_string();
        fs::write(checkpoint.0.join("sterna_golden.json"), golden).unwrap();
        checkpoint
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for GoldenCheckpoint {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0)); // The system cleans its temporary directory.
    }
}

#[tokio::test]
async fn recorded_tokens_are_checked_before_the_server_is_ready() {
    let right = GoldenCheckpoint::new(&[40, 371]);
    let server = Server::start(&["--model", right.path(), "--threads", "1"]).await;
    assert_eq!(server.get("/ready").await.status(), 200);
    assert!(server.terminate().success());

    let wrong = GoldenCheckpoint::new(&[41, 371]);
    let output = run(&["--port", "0", "--model", wrong.path(), "--threads", "1"]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    let expected = "sterna: sterna_golden.json: case 0, position 0 (both from 0): the model says \
                    token 40, but the file says 41.";
    assert!(
        error.lines().last().unwrap().starts_with(expected),
        "{error}"
    );
    assert!(
        output.stdout.is_empty(),
        "no greeting of a server that is ready"
    );
}

#[tokio::test]
async fn a_model_of_fast_dllm_answers_by_diffusion_alone() {
    let checkpoint = GoldenCheckpoint::fast_dllm("served");
    let flags = [
        "--model",
        checkpoint.path(),
        "--threads",
        "1",
        "--served-model-name",
        "blocks",
    ];
    let server = Server::start(&flags).await;
    let models = json_of(server.get("/v1/models").await).await;
    let models = models["data"].as_array().unwrap();
    assert_eq!(models.len(), 1, "{models:?}");
    let body = greedy_request();
    let mut answers = Vec::new();
    for cached in [0, 32] {
        let answer = json_of(server.post("/v1/completions", &body).await).await;
        let usage = &answer["usage"];
        assert_eq!(usage["completion_tokens"], 40, "{answer}");
        let details = &usage["prompt_tokens_details"];
        assert_eq!(details["cached_tokens"], cached, "whole blocks: {answer}");
        let tokens = answer["choices"][0]["token_ids"].clone();
        assert!(
            !tokens.as_array().unwrap().contains(&json!(300)),
            "{tokens}"
        );
        answers.push(tokens);
    }
    assert_eq!(answers[0], answers[1]);
    let metrics = crate::client::text(server.get("/metrics").await).await;
    assert!(!metrics.contains("sterna_block_passes_total{model_name=\"blocks\",engine=\"0\"} 0"));
    let guided = json!({"model": "blocks", "prompt": "a", "guided_regex": "a+"});
    let refused = json_of(server.post("/v1/completions", &guided).await).await;
    assert_eq!(refused["error"]["param"], "guided_regex", "{refused}");

    for way in ["autoregressive", "self-speculation"] {
        let output = run(&[
            "--port",
            "0",
            "--model",
            checkpoint.path(),
            "--decoding",
            way,
        ]);
        assert_eq!(output.status.code(), Some(2));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains("for diffusion alone"), "{error}");
    }
    let tenants = checkpoint.0.join("tenants.toml");
    let tenant = format!(
        "[[tenant]]\nid = \"a\"\nkey_sha256 = \"{}\"\n",
        "0".repeat(64)
    );
    let text = tenant + "[[public_prefix]]\nname = \"x\"\nsystem = \"y\"\n";
    fs::write(&tenants, text).unwrap();
    let tenants = tenants.to_str().unwrap();
    let path = checkpoint.path();
    let output = run(&["--port", "0", "--model", path, "--tenants", tenants]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.contains("public prefix `x`: a token of this model"),
        "{error}"
    );
}

/// Returns a greedy request for 40 tokens.
fn greedy_request() -> Value {
    let prompt: Vec<u32> = (20..57).collect();
    json!({
        "model": "blocks", "prompt": prompt, "max_tokens": 40, "temperature": 0,
        "ignore_eos": true, "return_token_ids": true,
    })
}

#[tokio::test]
async fn flags_say_what_no_file_says_of_masked_blocks() {
    let plain = fixture("qwen2-group64");
    let plain = ["--model", plain.to_str().unwrap(), "--threads", "1"];
    let blocks = ["--diffusion-block", "16", "--served-model-name", "blocks"];
    let mask = ["--diffusion-mask-token", "300"];
    let by_flags = Server::start(&[&plain[..], &blocks, &mask].concat()).await;
    let checkpoint = GoldenCheckpoint::fast_dllm("stated");
    let stated = ["--model", checkpoint.path(), "--threads", "1"];
    let by_files = Server::start(&[&stated[..], &blocks[2..]].concat()).await;
    let mut answers = Vec::new();
    for server in [by_flags, by_files] {
        let answer = json_of(server.post("/v1/completions", &greedy_request()).await).await;
        answers.push(answer["choices"][0]["token_ids"].clone());
    }
    assert_eq!(answers[0].as_array().unwrap().len(), 40);
    assert_eq!(answers[0], answers[1]);
    for (flags, problem) in [
        (
            &mask[..],
            "how many tokens a masked block has: give --diffusion-block",
        ),
        (
            &["--diffusion-mask-token", "324", "--diffusion-block", "16"],
            "--diffusion-mask-token 324: the model has 324 tokens, numbered from 0",
        ),
        (
            &["--diffusion-block", "16"],
            "--diffusion-block: the model's files name no masked blocks",
        ),
        (
            &["--diffusion-block-cache"],
            "--diffusion-block-cache: the model's files name no masked blocks",
        ),
    ] {
        let output = run(&[&["--port", "0"], &plain[..], flags].concat());
        assert_eq!(output.status.code(), Some(2));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(problem), "{error}");
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// The embeddings agree with the reference, within what rounding allows.
#[tokio::test]
async fn a_checkpoint_without_a_head_serves_embeddings() {
    for name in ["embedding-qwen3", "embedding-gemma3"] {
        let folder = fixture(name);
        let expected = fs::read(folder.join("expected.json")).unwrap();
        let expected: Value = serde_json::from_slice(&expected).unwrap();
        let prompts = expected["prompts"].as_array().unwrap().iter();
        let prompts: Vec<&Value> = prompts.map(|prompt| &prompt["prompt"]).collect();
        let server = Server::start(&["--model", folder.to_str().unwrap(), "--threads", "1"]).await;
        let ask = async |path: &str, body: Value| {
            let response = server.post(path, &body).await;
            (response.status().as_u16(), json_of(response).await)
        };
        let (status, all) = ask("/v1/embeddings", json!({"input": prompts})).await;
        assert_eq!(status, 200, "{all}");
        let tensors = fs::read(folder.join("expected.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&tensors).unwrap();
        for (index, prompt) in prompts.iter().enumerate() {
            let (_, alone) = ask("/v1/embeddings", json!({"input": prompt})).await;
            let got = &all["data"][index]["embedding"];
            assert_eq!(*got, alone["data"][0]["embedding"], "alone = together");
            let wanted = tensors
                .tensor(&format!("prompt.{index}.embedding"))
                .unwrap();
            let wanted = wanted.data().chunks_exact(4);
            let wanted = wanted.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
            let got = got
                .as_array()
                .unwrap()
                .iter()
                .map(|value| value.as_f64().unwrap());
            let cosine: f64 = got
                .zip(wanted)
                .map(|(got, wanted)| got * f64::from(wanted))
                .sum();
            assert!(cosine > 0.999, "{name} {index}: {cosine}");
        }
        assert!(server.greeting.contains("/v1/embeddings"));
        assert!(!server.greeting.contains("chat"), "{}", server.greeting);
        let (status, refused) = ask("/v1/completions", json!({"prompt": "a"})).await;
        assert_eq!(status, 400);
        assert_eq!(
            refused["error"]["code"], "unsupported_parameter",
            "{refused}"
        );
        assert!(server.terminate().success());
    }
}

#[test]
fn a_checkpoint_without_stop_tokens_starts_with_a_warning() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("server-without-stops");
    drop(fs::remove_dir_all(&folder)); // An earlier run that failed left it.
    fs::create_dir_all(&folder).unwrap();
    for entry in fs::read_dir(fixture("bitnet-packed")).unwrap() {
        let path = entry.unwrap().path();
        let mut content = fs::read(&path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.ends_with("config.json") {
            let mut json: Value = serde_json::from_slice(&content).unwrap();
            let fields = json.as_object_mut().unwrap();
            fields.shift_remove("eos_token_id");
            fields.shift_remove("eos_token");
            content = json.to_string().into_bytes();
        }
        fs::write(folder.join(name), content).unwrap();
    }
    let mut program = Command::new(env!("CARGO_BIN_EXE_sterna"));
    let program = program.args(["--port", "0", "--model"]).arg(&folder);
    let mut process = program.stderr(Stdio::piped()).spawn().unwrap();
    let log = BufReader::new(process.stderr.take().unwrap()).lines();
    let mut log = log.map_while(Result::ok);
    let warning = log.find(|line| line.contains("names no stop token"));
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(warning.is_some_and(|line| line.contains("WARN")));
}

#[tokio::test]
async fn a_synthesized_checkpoint_is_served() {
    let directory = std::env::temp_dir().join(format!("sterna-synthetic-{}", std::process::id()));
    let path = directory.to_str().unwrap();
    let written = run(&["synthesize", "--shape", "tiny", path]);
    assert!(
        written.status.success(),
        "{}",
        String::from_utf8_lossy(&written.stderr)
    );
    let again = run(&["synthesize", "--shape", "tiny", path]);
    assert_eq!(
        again.status.code(),
        Some(2),
        "a directory that is not empty is never overwritten"
    );
    let server = Server::start(&["--model", path, "--threads", "1"]).await;
    let answer = server.chat(&[message("user", "Hello")], 8).await;
    assert!(
        answer["usage"]["completion_tokens"].as_u64().unwrap() >= 1,
        "{answer}"
    );
    assert_eq!(server.terminate().code(), Some(0));
    std::fs::remove_dir_all(directory).unwrap();
}
