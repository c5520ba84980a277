//! Embeddings through the engine: each equals, bit for bit, the embedding of its text alone, in any
//! company, in any chunks, on models with and without an output head.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use sterna::checkpoint::Source;
use sterna::engine::{
    CostModel, Engine, EngineConfig, EngineHandle, EventStream, FinishReason, GenerationRequest,
    Limits, Policy, Pooling, SamplingParams, StreamEvent, TenantId, TokenId,
};
use sterna::metrics::{Identity, Metrics};
use sterna::model::{LoadOptions, Model};
use sterna_kernels::Kernels;
use sterna_random::Random;

const PATIENCE: Duration = Duration::from_secs(60);
const MEAN: &str = r#"{"word_embedding_dimension": 128, "pooling_mode_mean_tokens": true}"#;

/// Loads a fixture. Its embeddings are means if `pooling` says so.
fn load(name: &str, pooling: Pooling) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name);
    let entries = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let named = entries.filter(|path| path.is_file() && path.extension().unwrap() != "gguf");
    let files = named.map(|path| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, fs::read(path).unwrap())
    });
    let statement = ("1_Pooling/config.json".to_owned(), MEAN.into());
    let statement = (pooling == Pooling::Mean).then_some(statement);
    let source = Source::in_memory(files.chain(statement));
    Model::load(&source, LoadOptions::new(Kernels::best(), 2)).unwrap()
}

fn start(model: Model) -> EngineHandle {
    let config = EngineConfig {
        limits: Limits {
            pages: 40, // Fewer than all texts need, so that some wait or are preempted.
            max_running: 6,
            max_queued: 256,
            max_queued_time: u64::MAX,
            step_tokens: 48,
            prefill_chunk: 20,
            max_sequence_tokens: 160,
            states: None,
            diffusion: None,
        },
        policy: Policy::default(),
        public_prefixes: Vec::new(),
        cost: Some(CostModel::UNMEASURED),
        submit_queue: 256,
        drain_limit: PATIENCE,
        stall_limit: PATIENCE,
        pin: false,
    };
    let metrics = Metrics::new(&Identity::default());
    Engine::start(model, config, metrics).unwrap().0
}

fn submit(engine: &EngineHandle, prompt: &[TokenId], pooling: Option<Pooling>) -> EventStream {
    let request = GenerationRequest {
        prompt: prompt.to_vec(),
        sampling: SamplingParams {
            pooling,
            ..SamplingParams::greedy()
        },
        max_new_tokens: if pooling.is_some() { 1 } else { 20 },
        is_length_given: false,
        min_new_tokens: 0,
        stop_tokens: Vec::new(),
        tenant: TenantId(0),
        sub_tenant: None,
        band: None,
        arrived: Instant::now(),
        first_token_within: None,
        ends_within: None,
    };
    engine.submit(request).unwrap()
}

/// What a request got: the bits of its embedding, or its tokens.
#[derive(Debug, PartialEq)]
enum Answer {
    Embedding(Vec<u32>),
    Tokens(Vec<TokenId>),
}

async fn answer(mut stream: EventStream) -> Answer {
    let (mut embedding, mut tokens) = (None, Vec::new());
    loop {
        let event = tokio::time::timeout(PATIENCE, stream.recv()).await.unwrap();
        match event.expect("a terminal event") {
            StreamEvent::Accepted => {}
            StreamEvent::Embedding(values) => {
                assert!(embedding.is_none(), "one embedding for a text");
                embedding = Some(values);
            }
            StreamEvent::Token(output) => tokens.push(output.token),
            StreamEvent::Finished { reason, .. } => {
                assert_eq!(reason, FinishReason::Length);
                let Some(values) = embedding else {
                    return Answer::Tokens(tokens);
                };
                assert!(tokens.is_empty(), "no token for a text");
                return Answer::Embedding(values.iter().map(|value| value.to_bits()).collect());
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn an_embedding_is_that_of_its_text_alone() {
    let mut random = Random::from_env();
    for (name, has_head) in [("embedding-qwen3", false), ("qwen3-group64-yarn", true)] {
        for pooling in [Pooling::LastToken, Pooling::Mean] {
            let mut model = load(name, pooling);
            assert_eq!(model.config().pooling, pooling);
            let vocabulary = model.config().vocab as u64;
            let shared: Vec<TokenId> = (0..60).map(|_| random.below(vocabulary) as u32).collect();
            let texts: Vec<Vec<TokenId>> = (0..16)
                .map(|_| {
                    let kept = random.below(61) as usize;
                    let own = (0..1 + random.below(60)).map(|_| random.below(vocabulary) as u32);
                    shared[..kept].iter().copied().chain(own).collect()
                })
                .collect();
            let bits = |values: Vec<f32>| values.iter().map(|value| value.to_bits()).collect();
            let mut wanted = Vec::new();
            for text in &texts {
                let embedding = model.embed_text(text).unwrap().unwrap();
                wanted.push(Answer::Embedding(bits(embedding)));
            }
            let engine = start(model);
            let mut generated = Vec::new();
            if has_head {
                for text in &texts[..4] {
                    engine.reset_prefix_cache().await.unwrap();
                    generated.push(answer(submit(&engine, text, None)).await);
                }
            }
            // With a cold cache and with what the first round has left in it.
            for round in 0..2 {
                let streams = texts
                    .iter()
                    .map(|text| submit(&engine, text, Some(pooling)));
                let streams: Vec<EventStream> = streams.collect();
                let answers = texts[..generated.len()].iter();
                let answers = answers.map(|text| submit(&engine, text, None));
                let answers: Vec<EventStream> = answers.collect();
                for (index, stream) in streams.into_iter().enumerate() {
                    let got = answer(stream).await;
                    assert!(got == wanted[index], "{name} {pooling:?} {round} {index}");
                }
                for (stream, wanted) in answers.into_iter().zip(&generated) {
                    assert_eq!(answer(stream).await, *wanted, "{name} {pooling:?} {round}");
                }
            }
            // A client that leaves frees its pages.
            drop(submit(&engine, &texts[0], Some(pooling)));
            let free = async {
                while engine.load().used_tokens > 0 || engine.load().queued > 0 {
                    engine.reset_prefix_cache().await.unwrap();
                }
            };
            tokio::time::timeout(PATIENCE, free).await.unwrap();
        }
    }
}
