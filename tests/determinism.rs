//! An answer does not depend on the requests beside it. Tokens and logprob bits of the demo model
//! are equal alone, in any batch, chunked, from the prefix cache, after eviction and preemption,
//! with and without draft tokens, and with any number of threads.
//!
//! Each test also asserts that its condition occurred.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sterna::checkpoint::synthetic::{ExpertSizes, RecurrentHeads, Shape};
use sterna::checkpoint::{MAPLE, ModelConfig, QWEN3_5, Source};
use sterna::engine::{
    Budget, CostModel, Diffusion, Engine, EngineConfig, EngineHandle, EventStream, Forward,
    GenerationRequest, Limits, LogitRows, Policy, SamplingParams, StreamEvent, TenantId, Unmasking,
};
use sterna::metrics::{Identity, Metrics};
use sterna::model::{ExpertUse, HeadChoice, KvStore, LoadOptions, Model, WantedLogits};
use sterna_kernels::{Isa, Kernels, KvDtype};
use sterna_random::Random;
use sterna_scheduler::{Batch, OwnDrafts, PAGE_TOKENS, StateLimits};

/// Counts of what the model ran, so that a test can show that its condition occurred.
#[derive(Default)]
struct Seen {
    /// The largest number of rows in a step.
    max_rows: usize,
    /// Chunks of more than one token that began after position 0.
    later_chunks: usize,
    /// Steps with both a decode and a chunk.
    mixed_steps: usize,
    /// Passes that draft. The test may let them panic.
    drafting_passes: usize,
    drafting_panics: bool,
    /// Steps, except the last, that computed only likely rows of the output head.
    likely_steps: u64,
}

/// The demo model. While a test holds `gate`, no step begins its forward pass.
struct Recorded {
    model: Model,
    seen: Arc<Mutex<Seen>>,
    gate: Arc<Mutex<()>>,
}

impl Forward for Recorded {
    type KvStore = KvStore;

    fn vocabulary(&self) -> usize {
        Forward::vocabulary(&self.model)
    }

    fn expert_use(&self) -> ExpertUse {
        self.model.expert_use()
    }

    fn new_kv_store(&self, limits: &Limits) -> std::io::Result<KvStore> {
        Forward::new_kv_store(&self.model, limits)
    }

    fn prepare(&mut self) -> bool {
        Forward::prepare(&mut self.model)
    }

    fn max_wanted_rows(&self) -> usize {
        Forward::max_wanted_rows(&self.model)
    }

    fn want_logits(&mut self, wanted: &WantedLogits) {
        Forward::want_logits(&mut self.model, wanted);
    }

    fn forward(&mut self, batch: &Batch, kv_store: &mut KvStore) -> impl LogitRows {
        drop(self.gate.lock().unwrap());
        let mut seen = self.seen.lock().unwrap();
        let chunks = batch.rows().iter().filter(|row| row.len() > 1).count();
        seen.max_rows = seen.max_rows.max(batch.rows().len());
        seen.later_chunks += batch
            .rows()
            .iter()
            .filter(|row| row.len() > 1 && row.start > 0)
            .count();
        seen.mixed_steps += usize::from(chunks > 0 && chunks < batch.rows().len());
        let drafts = batch.rows().iter().any(|row| row.block == u32::MAX);
        seen.drafting_passes += usize::from(drafts);
        let panics = drafts && seen.drafting_panics;
        seen.likely_steps = self.model.likely_use().steps;
        drop(seen);
        assert!(!panics, "a pass that drafts");
        Forward::forward(&mut self.model, batch, kv_store)
    }
}

/// An engine over the demo model, its metrics and its counts.
struct Server {
    handle: EngineHandle,
    metrics: Metrics,
    seen: Arc<Mutex<Seen>>,
    gate: Arc<Mutex<()>>,
}

/// Limits under which the engine chunks, evicts and preempts nothing.
const ROOMY: Limits = Limits {
    pages: 2048,
    max_running: 64,
    max_queued: 1024,
    max_queued_time: u64::MAX,
    step_tokens: 2048,
    prefill_chunk: 1024,
    max_sequence_tokens: 1024,
    states: None,
    diffusion: None,
};

const ONE_HOUR: u64 = 3_600_000_000; // In microseconds.

fn start(limits: Limits, threads: usize) -> Server {
    start_drafting(limits, threads, 0)
}

/// Starts an engine that proposes up to `max_draft` draft tokens for a sequence.
fn start_drafting(limits: Limits, threads: usize, max_draft: u32) -> Server {
    start_storing(KvDtype::F16, limits, threads, max_draft)
}

/// Starts an engine that stores keys and values in the given format.
fn start_storing(kv_dtype: KvDtype, limits: Limits, threads: usize, max_draft: u32) -> Server {
    let drafts = looked_up(max_draft);
    start_model(&sterna::demo::source(), kv_dtype, limits, threads, drafts)
}

/// Returns a policy with up to `max_draft` drafts that are looked up.
fn looked_up(max_draft: u32) -> Policy {
    Policy {
        // On a busy machine, a budget that steps exceed would cut prompts into chunks.
        budget: Budget::within(ONE_HOUR),
        max_draft,
        ..Policy::default()
    }
}

/// Returns a policy in which the demo also drafts for itself.
fn with_own_drafts(max_draft: u32) -> Policy {
    let blocks = ModelConfig::read(&sterna::demo::source())
        .unwrap()
        .masked_blocks;
    let blocks = blocks.expect("the demo fills masked tokens");
    Policy {
        own_drafts: Some(OwnDrafts {
            mask_token: blocks.mask_token.unwrap(),
            block: blocks.size.unwrap() as u32,
        }),
        ..looked_up(max_draft)
    }
}

/// A model with recurrent layers between those that attend.
const RECURRENT: Shape = Shape {
    name: "recurrent",
    architecture: &QWEN3_5,
    vocab: 2048,
    hidden: 128,
    intermediate: 192,
    layers: 4,
    heads: 4,
    kv_heads: 2,
    head_dim: 32,
    max_position: 1024,
    rope_theta: 10_000.0,
    tied: true,
    group: Some(64),
    recurrent: Some(RecurrentHeads {
        interval: 3,
        key_heads: 2,
        value_heads: 4,
        head_dim: 32,
        taps: 4,
    }),
    experts: None,
};

/// A random model whose feed-forward halves are mixtures. Its groups do not divide a panel. Most
/// layers attend to near tokens.
const MIXTURE: Shape = Shape {
    name: "mixture",
    architecture: &MAPLE,
    hidden: 128,
    group: Some(64),
    recurrent: None,
    experts: Some(ExpertSizes {
        count: 12,
        used: 3,
        intermediate: 64,
    }),
    ..RECURRENT
};

/// Starts an engine over [`RECURRENT`]. With `few_slabs`, only running sequences have states.
fn start_recurrent(limits: Limits, few_slabs: bool, threads: usize, max_draft: u32) -> Server {
    start_shape(RECURRENT, limits, few_slabs, threads, max_draft)
}

fn start_shape(
    shape: Shape,
    limits: Limits,
    few_slabs: bool,
    threads: usize,
    max_draft: u32,
) -> Server {
    let cached = if few_slabs { 1 } else { 200 };
    let limits = Limits {
        states: Some(StateLimits {
            slabs: limits.max_running + cached,
            in_place_tokens: 4,
            trial_interval: 32,
        }),
        ..limits
    };
    let source = shape.in_memory(1);
    start_model(&source, KvDtype::F16, limits, threads, looked_up(max_draft))
}

fn start_model(
    source: &Source,
    kv_dtype: KvDtype,
    limits: Limits,
    threads: usize,
    policy: Policy,
) -> Server {
    let options = LoadOptions {
        kv_dtype,
        max_step_tokens: limits.max_batch_tokens(),
        max_logits_rows: limits.max_logits(),
        exact_head_bytes: 0, // The screened head of large models.
        head_choice: HeadChoice::LikelyRows,
        ..LoadOptions::new(Kernels::new(Isa::best()).unwrap(), threads)
    };
    let model = Model::load(source, options).unwrap();
    let metrics = Metrics::new(&Identity {
        model_name: "demo".to_owned(),
        isa: Isa::best().to_string(),
        kv_dtype: kv_dtype.to_string(),
        kv_pages: limits.pages,
        page_tokens: PAGE_TOKENS as u32,
    });
    let seen = Arc::new(Mutex::new(Seen::default()));
    let gate = Arc::default();
    let config = EngineConfig {
        limits,
        policy,
        public_prefixes: Vec::new(),
        cost: Some(CostModel::UNMEASURED),
        submit_queue: 1024,
        drain_limit: Duration::from_secs(30),
        stall_limit: Duration::from_secs(60),
        pin: false,
    };
    let recorded = Recorded {
        model,
        seen: Arc::clone(&seen),
        gate: Arc::clone(&gate),
    };
    let (handle, _engine) = Engine::start(recorded, config, metrics.clone()).unwrap();
    Server {
        handle,
        metrics,
        seen,
        gate,
    }
}

impl Server {
    /// Returns the stream of a request and the number of its new tokens.
    fn submit(&self, request: GenerationRequest) -> (EventStream, u32) {
        let new_tokens = request.max_new_tokens;
        (self.handle.submit(request).unwrap(), new_tokens)
    }

    /// Returns the value of a counter that has no labels of its own.
    fn counter(&self, name: &str) -> u64 {
        let text = self.metrics.render();
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("{name}{{")));
        let value = line
            .and_then(|line| line.rsplit(' ').next())
            .and_then(|value| value.parse::<f64>().ok());
        value.unwrap_or_else(|| panic!("{name} is not in the metrics")) as u64
    }
}

/// Each token with the bits of its log-probability, and the three most likely tokens with theirs.
type Answer = Vec<(u32, u32, Vec<(u32, u32)>)>;

fn request(seed: u64, prompt_tokens: usize, new_tokens: u32) -> GenerationRequest {
    let mut random = Random::new(seed);
    let prompt = (0..prompt_tokens)
        .map(|_| random.below(2000) as u32)
        .collect();
    let greedy = seed.is_multiple_of(2);
    GenerationRequest {
        prompt,
        sampling: SamplingParams {
            temperature: if greedy { 0.0 } else { 0.9 },
            top_k: if seed.is_multiple_of(3) { 40 } else { 0 },
            top_p: if seed.is_multiple_of(5) { 0.9 } else { 1.0 },
            frequency_penalty: if seed % 7 == 1 { 0.3 } else { 0.0 },
            seed,
            logprobs: Some(3),
            ..SamplingParams::default()
        },
        max_new_tokens: new_tokens,
        is_length_given: false,
        min_new_tokens: 0,
        stop_tokens: Vec::new(),
        tenant: TenantId(0),
        sub_tenant: None,
        band: None,
        arrived: Instant::now(),
        first_token_within: None,
        ends_within: None,
    }
}

/// Reads a stream to its end, which comes after `new_tokens` tokens.
async fn answer((mut stream, new_tokens): (EventStream, u32)) -> Answer {
    stream.accepted().await.unwrap();
    let mut answer = Vec::new();
    loop {
        match stream.recv().await.expect("a terminal event comes first") {
            StreamEvent::Token(token) => {
                let top = token
                    .top
                    .iter()
                    .map(|(token, logprob)| (*token, logprob.to_bits()))
                    .collect();
                answer.push((token.token, token.logprob.unwrap().to_bits(), top));
            }
            StreamEvent::Finished { .. } => {
                assert_eq!(answer.len(), new_tokens as usize);
                return answer;
            }
            other => panic!("{other:?}"),
        }
    }
}

/// The tokens of a prompt after the first: each with the bits of its log-probability, its rank and
/// the bits of the most likely tokens' log-probabilities.
type Scores = Vec<(u32, u32, u32, Vec<(u32, u32)>)>;

/// A request whose prompt is scored.
fn scored(request: GenerationRequest) -> GenerationRequest {
    let sampling = SamplingParams {
        prompt_logprobs: Some(2),
        ..request.sampling
    };
    GenerationRequest {
        sampling,
        ..request
    }
}

/// Reads the scores of a prompt and the answer after it.
async fn scores((mut stream, new_tokens): (EventStream, u32)) -> (Scores, Answer) {
    stream.accepted().await.unwrap();
    let (mut scores, mut answer) = (Scores::new(), Answer::new());
    let bits = |top: &[(u32, f32)]| top.iter().map(|(token, l)| (*token, l.to_bits())).collect();
    loop {
        match stream.recv().await.expect("a terminal event comes first") {
            StreamEvent::Scored(score) => {
                assert!(answer.is_empty(), "scores come before the answer");
                let (logprob, top) = (score.logprob.to_bits(), bits(&score.top));
                scores.push((score.token, logprob, score.rank, top));
            }
            StreamEvent::Token(token) => {
                answer.push((
                    token.token,
                    token.logprob.unwrap().to_bits(),
                    bits(&token.top),
                ));
            }
            StreamEvent::Finished { .. } => {
                assert_eq!(answer.len(), new_tokens as usize);
                return (scores, answer);
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Scores the prompts of all requests at once.
#[tokio::main]
async fn scored_together(requests: &[GenerationRequest], server: &Server) -> Vec<(Scores, Answer)> {
    let streams: Vec<_> = {
        let _gate = server.gate.lock().unwrap();
        let submit = |request: &GenerationRequest| server.submit(scored(request.clone()));
        requests.iter().map(submit).collect()
    };
    let mut all = Vec::new();
    for stream in streams {
        all.push(scores(stream).await);
    }
    all
}

/// Requests of mixed lengths, half of them greedy. Some cross pages and an attention span of 256
/// keys.
fn requests() -> Vec<GenerationRequest> {
    let lengths = [1, 5, 15, 16, 17, 31, 48, 100, 255, 256, 300, 520];
    lengths
        .iter()
        .enumerate()
        .map(|(i, &length)| request(100 + i as u64, length, 8 + 3 * (i as u32 % 5)))
        .collect()
}

/// Requests whose answers are longer than their prompts, so that a small page pool runs out.
fn growing_requests() -> Vec<GenerationRequest> {
    (0..8)
        .map(|i| request(200 + i, 10 + 9 * i as usize, 100))
        .collect()
}

#[tokio::main]
async fn alone(
    requests: Vec<GenerationRequest>,
    limits: Limits,
    threads: usize,
) -> (Vec<Answer>, Server) {
    let server = start(limits, threads);
    let answers = in_turn(requests, &server).await;
    (answers, server)
}

/// Answers the requests one after the other, each with a cold cache.
async fn in_turn(requests: Vec<GenerationRequest>, server: &Server) -> Vec<Answer> {
    let mut answers = Vec::new();
    for request in requests {
        answers.push(answer(server.submit(request)).await);
        server.handle.reset_prefix_cache().await.unwrap();
    }
    answers
}

/// Answers all requests at once: each is submitted before the first step ends.
#[tokio::main]
async fn together(requests: Vec<GenerationRequest>, server: &Server) -> Vec<Answer> {
    let streams: Vec<_> = {
        let _gate = server.gate.lock().unwrap();
        let submit = |request| server.submit(request);
        requests.into_iter().map(submit).collect()
    };
    let mut answers = Vec::new();
    for stream in streams {
        answers.push(answer(stream).await);
    }
    answers
}

#[test]
fn a_batch_of_mixed_lengths_answers_as_each_request_alone() {
    let (expected, _) = alone(requests(), ROOMY, 1);
    let server = start(ROOMY, 1);
    assert_eq!(together(requests(), &server), expected);
    let seen = server.seen.lock().unwrap();
    assert!(
        seen.max_rows >= 6,
        "only {} rows ran together",
        seen.max_rows
    );
    assert!(seen.mixed_steps > 0, "no step mixed prefill and decode");
}

#[test]
fn chunked_prefill_gives_the_same_answers_as_whole_prefill() {
    let (expected, whole) = alone(requests(), ROOMY, 1);
    assert_eq!(whole.seen.lock().unwrap().later_chunks, 0);
    for prefill_chunk in [16, 48] {
        let (answers, chunked) = alone(
            requests(),
            Limits {
                prefill_chunk,
                step_tokens: 64,
                ..ROOMY
            },
            1,
        );
        assert_eq!(answers, expected, "chunks of {prefill_chunk}");
        assert!(
            chunked.seen.lock().unwrap().later_chunks > 10,
            "nothing was chunked"
        );
    }
}

/// Requests whose draws some logits decide.
fn narrow_requests() -> Vec<GenerationRequest> {
    let requests = (0..12).map(|i| {
        let request = request(2 * i, 10 + 20 * i as usize, 40);
        let sampling = SamplingParams {
            temperature: if i % 2 == 0 { 0.0 } else { 0.9 },
            top_k: if i % 4 == 1 { 1 + 3 * i as u32 } else { 0 },
            top_p: if i == 7 { 0.8 } else { 1.0 },
            min_p: if i == 11 { 0.1 } else { 0.0 },
            repetition_penalty: if i % 4 == 2 { 1.2 } else { 1.0 },
            presence_penalty: if i % 5 == 3 { 0.5 } else { 0.0 },
            frequency_penalty: if i % 6 == 4 { 0.3 } else { 0.0 },
            ..request.sampling
        };
        GenerationRequest {
            sampling,
            // Some forbid the tokens that end an answer.
            min_new_tokens: if i % 3 == 0 {
                request.max_new_tokens
            } else {
                0
            },
            stop_tokens: if i % 3 == 0 { vec![5, 9] } else { Vec::new() },
            ..request
        }
    });
    requests.collect()
}

/// Reads the tokens of the requests without log-probabilities, `at_once` of them at a time.
fn plain_tokens(server: &Server, at_once: usize) -> Vec<Vec<u32>> {
    plain_tokens_of(server, &narrow_requests(), at_once)
}

#[tokio::main]
async fn plain_tokens_of(
    server: &Server,
    requests: &[GenerationRequest],
    at_once: usize,
) -> Vec<Vec<u32>> {
    let mut answers = Vec::new();
    for some in requests.chunks(at_once) {
        let streams: Vec<_> = {
            let _gate = server.gate.lock().unwrap();
            let plain = some.iter().cloned().map(|mut request| {
                request.sampling.logprobs = None;
                request
            });
            plain.map(|request| server.submit(request)).collect()
        };
        for (mut stream, _) in streams {
            stream.accepted().await.unwrap();
            let mut tokens = Vec::new();
            while let Some(StreamEvent::Token(token)) = stream.recv().await {
                tokens.push(token.token);
            }
            answers.push(tokens);
        }
    }
    answers
}

#[test]
fn likely_rows_of_the_head_give_the_tokens_of_all_rows() {
    for (threads, max_draft) in [(1, 0), (2, 3)] {
        let (expected, _) = alone(narrow_requests(), ROOMY, 1);
        let tokens = |answer: &Answer| answer.iter().map(|(token, ..)| *token).collect();
        let expected: Vec<Vec<u32>> = expected.iter().map(tokens).collect();
        let server = start_drafting(ROOMY, threads, max_draft);
        // The engine builds the copy of the head between two requests.
        let patience = Instant::now() + Duration::from_secs(60);
        while server.seen.lock().unwrap().likely_steps == 0 {
            assert_eq!(plain_tokens(&server, 1), expected);
            assert!(Instant::now() < patience, "no step had likely rows");
        }
        let likely_steps = || server.seen.lock().unwrap().likely_steps;
        let (before, drawn) = (likely_steps(), 3); // At a temperature, with a penalty.
        plain_tokens_of(&server, &narrow_requests()[drawn..=drawn], 1);
        assert!(likely_steps() > before, "no draw had likely rows");
        for at_once in [1, 2, 3, 6] {
            assert_eq!(plain_tokens(&server, at_once), expected, "{at_once}");
        }
    }
}

#[test]
fn a_cached_prefix_gives_the_same_answers_as_a_cold_cache() {
    let server = start(ROOMY, 1);
    let cold = together(requests(), &server);
    let hits = server.counter("vllm:prefix_cache_hits_total");
    let warm = together(requests(), &server);
    assert_eq!(warm, cold);
    assert!(
        server.counter("vllm:prefix_cache_hits_total") >= hits + 1000,
        "the second round did not hit the cache"
    );
}

#[test]
fn preemption_and_eviction_change_no_answer() {
    let (expected, _) = alone(growing_requests(), ROOMY, 1);
    // One sequence needs at most 11 pages; all sequences together need about 70.
    let server = start(Limits { pages: 24, ..ROOMY }, 1);
    for _ in 0..3 {
        assert_eq!(together(growing_requests(), &server), expected);
    }
    assert!(
        server.counter("vllm:num_preemptions_total") > 0,
        "nothing was preempted"
    );
    assert!(
        server.counter("sterna_evictions_total") > 0,
        "nothing was evicted"
    );
}

#[test]
fn any_number_of_threads_gives_the_same_answers() {
    let (expected, _) = alone(requests(), ROOMY, 1);
    for threads in [2, 3] {
        let (answers, _) = alone(requests(), ROOMY, threads);
        assert_eq!(answers, expected, "{threads} threads");
        assert_eq!(
            together(requests(), &start(ROOMY, threads)),
            expected,
            "{threads} threads, together"
        );
    }
}

/// Requests whose prompts and answers repeat themselves, so that draft tokens are proposed. Some
/// are greedy, some sampled, one has a repetition penalty, and some end amid draft tokens.
fn repetitive_requests() -> Vec<GenerationRequest> {
    (0..10)
        .map(|i| {
            let mut request = request(300 + i, 12 + 7 * i as usize, 40 + 11 * (i as u32 % 4));
            request.prompt = request.prompt.repeat(3);
            request.sampling.temperature = [0.0, 0.3, 0.0, 0.7, 0.0][i as usize % 5];
            request.sampling.repetition_penalty = if i == 4 { 1.1 } else { 1.0 };
            request
        })
        .collect()
}

/// The metrics of drafts: how many were made, and how many were right.
const LOOKED_UP: [&str; 2] = [
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
];
const OWN: [&str; 2] = [
    "sterna_self_draft_tokens_total",
    "sterna_self_accepted_tokens_total",
];

/// Calls `check` until more than `few` drafts were accepted, and some rejected. The scheduler
/// drafts while that pays, which a busy machine seldom lets it find.
fn check_while_drafts_are_few(
    server: &Server,
    metrics: [&str; 2],
    few: u64,
    mut check: impl FnMut(),
) {
    const MOST_ROUNDS: u32 = 100;
    let mut rounds = 0;
    loop {
        let [drafted, accepted] = metrics.map(|name| server.counter(name));
        if accepted > few && accepted < drafted {
            return;
        }
        rounds += 1;
        assert!(rounds < MOST_ROUNDS, "{accepted} of {drafted} accepted");
        check();
    }
}

#[test]
fn answers_are_the_same_with_and_without_drafts() {
    let (expected, plain) = alone(repetitive_requests(), ROOMY, 1);
    assert_eq!(plain.counter("vllm:spec_decode_num_draft_tokens_total"), 0);
    for (pages, threads) in [(ROOMY.pages, 1), (ROOMY.pages, 2), (48, 1)] {
        let server = start_drafting(Limits { pages, ..ROOMY }, threads, 6);
        let in_turn = tokio::runtime::Runtime::new()
            .unwrap()
            .block_on(in_turn(repetitive_requests(), &server));
        let what = format!("{pages} pages, {threads} threads");
        assert_eq!(in_turn, expected, "{what}, in turn");
        assert_eq!(
            together(repetitive_requests(), &server),
            expected,
            "{what}, together"
        );
        check_while_drafts_are_few(&server, LOOKED_UP, 20, || {
            assert_eq!(
                together(repetitive_requests(), &server),
                expected,
                "{what}, again"
            );
        });
    }
}

/// Requests about the demo's subjects, which its own drafts know. Half of them are sampled.
fn known_requests() -> Vec<GenerationRequest> {
    // "User:\nWhat is the capital of France?<|eot_id|>Assistant:\n"
    let known = [
        2040, 286, 257, 315, 263, 288, 339, 289, 1538, 30, 2042, 284, 257,
    ];
    let of = |i: u64| {
        let mut request = request(400 + i, 1, 20 + 9 * (i as u32 % 4));
        request.prompt = known.repeat(1 + i as usize);
        request.sampling.temperature = [0.0, 0.5][i as usize % 2];
        request
    };
    (0..10).map(of).collect()
}

#[test]
fn answers_are_the_same_with_drafts_of_the_model_itself() {
    let requests = || [known_requests(), repetitive_requests()].concat();
    let (expected, _) = alone(requests(), ROOMY, 1);
    for (pages, threads, max_draft) in [(ROOMY.pages, 1, 0), (ROOMY.pages, 2, 6), (48, 1, 0)] {
        let limits = Limits { pages, ..ROOMY };
        let policy = with_own_drafts(max_draft);
        let source = sterna::demo::source();
        let server = start_model(&source, KvDtype::F16, limits, threads, policy);
        let in_turn = tokio::runtime::Runtime::new()
            .unwrap()
            .block_on(in_turn(requests(), &server));
        let what = format!("{pages} pages, {threads} threads, {max_draft} drafts");
        assert_eq!(in_turn, expected, "{what}, in turn");
        assert_eq!(together(requests(), &server), expected, "{what}, together");
        check_while_drafts_are_few(&server, OWN, 4, || {
            assert_eq!(together(requests(), &server), expected, "{what}, again");
        });
    }
}

#[test]
fn a_pass_that_drafts_and_panics_changes_no_answer() {
    let (expected, _) = alone(known_requests(), ROOMY, 1);
    let (source, policy) = (sterna::demo::source(), with_own_drafts(0));
    let server = start_model(&source, KvDtype::F16, ROOMY, 1, policy);
    server.seen.lock().unwrap().drafting_panics = true;
    assert_eq!(together(known_requests(), &server), expected);
    assert!(server.seen.lock().unwrap().drafting_passes > 0);
    assert_eq!(server.counter("sterna_self_accepted_tokens_total"), 0);
}

/// How [`no_condition_changes_an_answer`] runs its requests.
#[derive(Clone, Copy)]
struct Condition {
    name: &'static str,
    pages: u32,
    chunk: u32,
    threads: usize,
    drafts: u32,
    /// Whether the model drafts for itself, if it can.
    has_own_drafts: bool,
    runs: Runs,
}

#[derive(Clone, Copy)]
enum Runs {
    InTurn,
    Together,
    /// Together, twice. The second time, the prompts are in the prefix cache.
    Twice,
}

const fn condition(name: &'static str, runs: Runs) -> Condition {
    Condition {
        name,
        pages: ROOMY.pages,
        chunk: ROOMY.prefill_chunk,
        threads: 1,
        drafts: 0,
        has_own_drafts: false,
        runs,
    }
}

/// Few pages for requests that run together.
const FEW: u32 = 72;

const CONDITIONS: [Condition; 14] = [
    Condition {
        chunk: 16,
        ..condition("chunks of 16", Runs::InTurn)
    },
    Condition {
        chunk: 48,
        ..condition("chunks of 48", Runs::Together)
    },
    condition("together", Runs::Together),
    condition("cached prefixes", Runs::Twice),
    Condition {
        pages: FEW,
        ..condition("few pages", Runs::Together)
    },
    Condition {
        pages: FEW,
        ..condition("few pages, cached prefixes", Runs::Twice)
    },
    Condition {
        threads: 2,
        ..condition("2 threads", Runs::InTurn)
    },
    Condition {
        threads: 2,
        ..condition("2 threads, together", Runs::Together)
    },
    Condition {
        threads: 3,
        chunk: 48,
        ..condition("3 threads, chunks", Runs::Together)
    },
    Condition {
        drafts: 6,
        ..condition("drafts", Runs::InTurn)
    },
    Condition {
        drafts: 6,
        threads: 2,
        ..condition("drafts, 2 threads", Runs::Together)
    },
    Condition {
        drafts: 6,
        pages: FEW,
        ..condition("drafts, few pages", Runs::Together)
    },
    Condition {
        has_own_drafts: true,
        ..condition("drafts of the model", Runs::InTurn)
    },
    Condition {
        has_own_drafts: true,
        drafts: 6,
        pages: FEW,
        threads: 2,
        ..condition("drafts of the model, few pages, 2 threads", Runs::Twice)
    },
];

impl Condition {
    fn limits(self) -> Limits {
        Limits {
            pages: self.pages,
            prefill_chunk: self.chunk,
            step_tokens: if self.chunk < ROOMY.prefill_chunk {
                64
            } else {
                ROOMY.step_tokens
            },
            ..ROOMY
        }
    }

    fn start(self, kv_dtype: KvDtype) -> Server {
        let policy = match self.has_own_drafts {
            true => with_own_drafts(self.drafts),
            false => looked_up(self.drafts),
        };
        let (source, limits) = (sterna::demo::source(), self.limits());
        start_model(&source, kv_dtype, limits, self.threads, policy)
    }

    /// Starts an engine that fills blocks, some of them in two parts.
    fn start_with_blocks(self, (is_causal, has_block_cache): (bool, bool)) -> Server {
        let OwnDrafts { mask_token, .. } = with_own_drafts(0).own_drafts.unwrap();
        let limits = Limits {
            diffusion: Some(Diffusion {
                block: if is_causal { 16 } else { 32 }, // A page, or two.
                part: 8,
                mask_token,
                is_causal,
                has_block_cache,
            }),
            ..self.limits()
        };
        let policy = match self.has_own_drafts {
            true => with_own_drafts(self.drafts),
            false => looked_up(self.drafts),
        };
        let source = sterna::demo::source();
        start_model(&source, KvDtype::F16, limits, self.threads, policy)
    }

    fn start_recurrent(self) -> Server {
        let few_slabs = self.pages == FEW;
        start_recurrent(self.limits(), few_slabs, self.threads, self.drafts)
    }

    fn answers(self, requests: Vec<GenerationRequest>, server: &Server) -> Vec<Answer> {
        match self.runs {
            Runs::InTurn => tokio::runtime::Runtime::new()
                .unwrap()
                .block_on(in_turn(requests, server)),
            Runs::Together => together(requests, server),
            Runs::Twice => {
                let cold = together(requests.clone(), server);
                let warm = together(requests, server);
                assert_eq!(warm, cold, "{}", self.name);
                warm
            }
        }
    }
}

/// Returns random requests. Each depends on the seed and its own number. The prompts of some repeat
/// themselves, so that drafts are proposed.
fn random_requests(seed: u64, numbers: Range<u64>) -> Vec<GenerationRequest> {
    let random_request = |number| {
        let mut random = Random::new(seed.wrapping_add(number));
        let longest = [30, 100, 300][random.index(3)];
        let length = random.between(1, longest);
        let mut request = request(
            random.next_u64(),
            length as usize,
            random.between(4, 40) as u32,
        );
        if random.percent(30) {
            request.prompt = request.prompt.repeat(2);
        }
        request
    };
    numbers.map(random_request).collect()
}

/// Lets the output of a request come by block diffusion, if its seed is odd.
fn by_diffusion(request: GenerationRequest) -> GenerationRequest {
    if request.sampling.seed.is_multiple_of(2) {
        return request;
    }
    let OwnDrafts { mask_token, .. } = with_own_drafts(0).own_drafts.unwrap();
    let unmasking = Unmasking {
        threshold: 0.4,
        mask_token,
    };
    GenerationRequest {
        sampling: request.sampling.by_diffusion(unmasking),
        ..request
    }
}

/// Returns the prompts of `STERNA_PROMPTS`: a number of them, or a range such as `400..600`.
fn prompts_from_env() -> Range<u64> {
    let Ok(text) = std::env::var("STERNA_PROMPTS") else {
        return 0..8;
    };
    let number = |text: &str| text.parse::<u64>().unwrap();
    match text.split_once("..") {
        Some((first, last)) => number(first)..number(last),
        None => 0..number(&text),
    }
}

#[test]
fn no_condition_changes_an_answer() {
    check_all_conditions(KvDtype::F16);
}

#[test]
fn no_condition_changes_an_answer_with_keys_and_values_in_bf16() {
    check_all_conditions(KvDtype::Bf16);
}

#[test]
fn no_condition_changes_an_answer_with_keys_and_values_in_int8() {
    check_all_conditions(KvDtype::Int8);
}

#[test]
fn no_condition_changes_an_answer_with_keys_and_values_in_fp8_e4m3() {
    check_all_conditions(KvDtype::Fp8E4m3);
}

#[test]
fn no_condition_changes_an_answer_with_keys_and_values_in_fp8_e5m2() {
    check_all_conditions(KvDtype::Fp8E5m2);
}

#[test]
fn no_condition_changes_an_answer_of_a_recurrent_model() {
    let alone = start_recurrent(ROOMY, false, 1, 0);
    let servers = CONDITIONS.map(Condition::start_recurrent);
    compare_all_conditions("recurrent", &alone, &servers, |request| request);
    let count = |name: &str| {
        servers
            .iter()
            .map(|server| server.counter(name))
            .sum::<u64>()
    };
    assert!(
        count("vllm:prefix_cache_hits_total") > 0,
        "no state was reused"
    );
}

#[test]
fn no_condition_changes_an_answer_by_diffusion() {
    for kind in [(true, false), (true, true), (false, false)] {
        let condition = condition("alone", Runs::InTurn);
        let alone = condition.start_with_blocks(kind);
        let servers = CONDITIONS.map(|condition| condition.start_with_blocks(kind));
        let what = format!("blocks, causal keys and a block cache: {kind:?}");
        compare_all_conditions(&what, &alone, &servers, by_diffusion);
        let count = |name: &str| {
            let counts = servers.iter().map(|server| server.counter(name));
            counts.sum::<u64>()
        };
        assert!(count("vllm:prefix_cache_hits_total") > 0);
        let [passes, tokens] =
            ["sterna_block_passes_total", "sterna_unmasked_tokens_total"].map(count);
        assert!(passes > 100 && tokens > passes, "{tokens} in {passes}");
    }
}

#[test]
fn a_block_that_lost_its_pages_is_filled_as_if_it_had_not() {
    let requests = || growing_requests().into_iter().map(by_diffusion).collect();
    for kind in [(true, false), (false, true)] {
        let alone = condition("alone", Runs::InTurn);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let server = alone.start_with_blocks(kind);
        let expected = runtime.block_on(in_turn(requests(), &server));
        let pages = if kind.0 { 24 } else { 16 };
        let few = Condition { pages, ..alone };
        let server = few.start_with_blocks(kind);
        let mut rounds = 0;
        while rounds < 3 || server.counter("vllm:num_preemptions_total") == 0 {
            assert_eq!(together(requests(), &server), expected, "{kind:?}");
            rounds += 1;
            assert!(rounds < 30, "no sequence lost its pages");
        }
    }
}

#[test]
fn no_condition_changes_an_answer_of_a_mixture() {
    let random = MIXTURE.in_memory(1);
    let [config, weights] = ["config.json", "model.safetensors"].map(|name| {
        let content = random.read(name).unwrap().unwrap();
        (name.to_owned(), content.to_vec())
    });
    let mut short: serde_json::Value = serde_json::from_slice(&config.1).unwrap();
    short["sliding_window"] = 24.into(); // Shorter than the prompts.
    let source = Source::in_memory([(config.0, short.to_string().into_bytes()), weights]);
    let start = |condition: Condition| {
        let (limits, drafts) = (condition.limits(), looked_up(condition.drafts));
        start_model(&source, KvDtype::F16, limits, condition.threads, drafts)
    };
    let alone = start(condition("alone", Runs::InTurn));
    let servers = CONDITIONS.map(start);
    compare_all_conditions("mixture", &alone, &servers, |request| request);
    let counts = ["hits", "candidates", "rows", "rows_at_largest_load"];
    let counts = counts.map(|name| alone.counter(&format!("sterna_expert_{name}_total")));
    let [hits, candidates, rows, rows_at_largest_load] = counts;
    assert!(0 < hits && hits < candidates, "{counts:?}");
    assert!(hits <= rows && rows < rows_at_largest_load, "{counts:?}");
}

/// With few different tokens, the answers of random weights repeat themselves.
#[test]
fn rejected_drafts_change_no_answer_of_a_recurrent_model() {
    const VOCAB: u32 = 24;
    let shape = Shape {
        vocab: VOCAB as usize,
        ..RECURRENT
    };
    let mut all = repetitive_requests();
    for request in &mut all {
        request.prompt.iter_mut().for_each(|token| *token %= VOCAB);
        request.sampling.temperature = 0.0;
    }
    let expected = together(all.clone(), &start_shape(shape, ROOMY, false, 1, 0));
    for (few_slabs, threads, drafts) in [(false, 1, 3), (false, 2, 6), (true, 3, 1)] {
        let server = start_shape(shape, ROOMY, few_slabs, threads, drafts);
        let check = || assert_eq!(together(all.clone(), &server), expected, "{drafts} drafts");
        check();
        check_while_drafts_are_few(&server, LOOKED_UP, 4, check);
    }
}

#[test]
fn cached_states_give_the_same_answers_and_scores_as_none() {
    let all = growing_requests();
    let server = start_recurrent(ROOMY, false, 1, 0);
    let expected: Vec<_> = (all.iter())
        .map(|request| scored_together(std::slice::from_ref(request), &server).remove(0))
        .collect();
    assert_eq!(scored_together(&all, &server), expected, "cached");
    let chunked = Limits {
        prefill_chunk: 16,
        step_tokens: 32,
        ..ROOMY
    };
    assert_eq!(
        scored_together(&all, &start_recurrent(chunked, false, 2, 3)),
        expected
    );
    let few = Limits { pages: 24, ..ROOMY };
    let server = start_recurrent(few, true, 2, 0);
    assert_eq!(scored_together(&all, &server), expected, "preempted");
    assert!(server.counter("vllm:num_preemptions_total") > 0);
}

/// `STERNA_PROMPTS` sets the number of prompts, or a range of them, so that several runs of one
/// seed can share a long one.
fn check_all_conditions(kv_dtype: KvDtype) {
    let alone = start_storing(kv_dtype, ROOMY, 1, 0);
    let servers = CONDITIONS.map(|condition| condition.start(kv_dtype));
    compare_all_conditions(&kv_dtype.to_string(), &alone, &servers, |request| request);
}

/// Compares the answers of `servers`, one for each condition, with those of `alone`.
fn compare_all_conditions(
    what: &str,
    alone: &Server,
    servers: &[Server],
    change: fn(GenerationRequest) -> GenerationRequest,
) {
    const AT_ONCE: u64 = 48;
    let prompts = prompts_from_env();
    let seed = Random::from_env().next_u64();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for first in prompts.clone().step_by(AT_ONCE as usize) {
        let requests = random_requests(seed, first..prompts.end.min(first + AT_ONCE));
        let requests: Vec<_> = requests.into_iter().map(change).collect();
        let expected = runtime.block_on(in_turn(requests.clone(), alone));
        for (condition, server) in CONDITIONS.iter().zip(servers) {
            let answers = condition.answers(requests.clone(), server);
            for (index, (answer, expected)) in answers.iter().zip(&expected).enumerate() {
                let name = condition.name;
                assert_eq!(answer, expected, "{what}, {name}, request {index}");
            }
            let reset = server.handle.reset_prefix_cache();
            runtime.block_on(reset).unwrap();
        }
    }
}

#[test]
fn the_scores_of_a_prompt_do_not_depend_on_company_chunks_caches_or_preemption() {
    let all = growing_requests();
    let (answers, _) = alone(all.clone(), ROOMY, 1);
    let server = start(ROOMY, 1);
    let mut expected = Vec::new();
    for (request, answer) in all.iter().zip(&answers) {
        let alone = scored_together(std::slice::from_ref(request), &server);
        let (scores, scored_answer) = &alone[0];
        assert_eq!(scored_answer, answer, "scoring changes no answer");
        let tokens = scores.iter().map(|(token, ..)| *token);
        assert!(tokens.eq(request.prompt[1..].iter().copied()));
        expected.extend(alone);
    }
    // The pages of all prompts are cached now.
    assert_eq!(scored_together(&all, &server), expected);

    let chunked = Limits {
        prefill_chunk: 16,
        step_tokens: 32,
        ..ROOMY
    };
    let server = start(chunked, 1);
    assert_eq!(scored_together(&all, &server), expected);
    assert!(server.seen.lock().unwrap().later_chunks > 10);

    let server = start(Limits { pages: 24, ..ROOMY }, 2);
    assert_eq!(scored_together(&all, &server), expected);
    assert!(server.counter("vllm:num_preemptions_total") > 0);
}

/// A client that scores a text finds what the model reported when it wrote it.
#[test]
fn the_score_of_a_token_is_the_log_probability_with_which_it_was_drawn() {
    let request = request(2, 20, 150);
    let (answers, _) = alone(vec![request.clone()], ROOMY, 1);
    let written: Vec<u32> = answers[0].iter().map(|(token, ..)| *token).collect();
    let text = GenerationRequest {
        prompt: [request.prompt.clone(), written].concat(),
        max_new_tokens: 1,
        ..request.clone()
    };
    let server = start(ROOMY, 1);
    let (scores, _) = scored_together(&[text], &server).remove(0);
    let of_answer = scores[request.prompt.len() - 1..].iter();
    let found: Vec<_> = of_answer
        .map(|(token, logprob, ..)| (*token, *logprob))
        .collect();
    let drawn = answers[0].iter();
    let drawn: Vec<_> = drawn
        .map(|(token, logprob, _)| (*token, *logprob))
        .collect();
    assert_eq!(found, drawn);
}
