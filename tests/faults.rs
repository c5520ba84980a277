//! Faults at every named place of a step: a panic, a stall or NaN in the real model and sampler.
//!
//! Each fault comes while one marked request runs beside others. The others must answer as they do
//! alone, and the same engine must go on through all faults.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use clap::Parser;
use sterna::checkpoint::synthetic::{ExpertSizes, RecurrentHeads, Shape};
use sterna::checkpoint::{QWEN3_5, QWEN3_MOE};
use sterna::config::Cli;
use sterna::engine::{
    CostModel, Engine, EngineConfig, EngineHandle, EventStream, Forward, GenerationRequest, Limits,
    LogitRows, Policy, SamplingParams, StreamEvent, TenantId, TokenId, TokenOutput,
};
use sterna::fault::{Hook, Place, set_hook};
use sterna::metrics::{Identity, Metrics};
use sterna::model::{
    ComparedStage, HeadChoice, KvStore, LoadOptions, Model, SelfTestError, WantedLogits, toy,
};
use sterna::startup::serve;
use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, StateLimits};

/// The first token of the marked prompt. No other prompt and no answer has it.
const MARK: TokenId = 4000;

/// The prompt tokens of the marked request.
const MARKED_TOKENS: usize = 31;
/// The token that the marked request repeats if its drafts shall be accepted.
const REPEATED: TokenId = 9;
/// A timeout that only a hanging test reaches.
const GUARD: Duration = Duration::from_secs(120);
/// The hook is one for the whole process.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// A recurrent layer and one that attends. There are more tokens than a top-k that is sorted.
const SHAPE: Shape = Shape {
    vocab: 4096,
    architecture: &QWEN3_5,
    recurrent: Some(RecurrentHeads {
        interval: 2,
        key_heads: 2,
        value_heads: 4,
        head_dim: 32,
        taps: 4,
    }),
    experts: None,
    ..toy::SHAPE
};

/// What the batch that is computed has of the marked request.
#[derive(Default)]
struct Marked {
    sequence: Option<SequenceId>,
    is_inside: bool,
    is_decode: bool,
    tokens: Range<usize>, // Among the batch's tokens.
    logits: Range<usize>, // Among the batch's rows of logits.
}

impl Marked {
    fn look(&mut self, batch: &Batch) {
        self.is_inside = false;
        let (mut tokens, mut logits) = (0, 0);
        for row in batch.rows() {
            let own = tokens..tokens + row.len();
            let own_logits = logits..logits + row.logits as usize;
            (tokens, logits) = (own.end, own_logits.end);
            if row.start == 0 && batch.tokens(row)[0] == MARK {
                self.sequence = Some(row.sequence);
            }
            if self.sequence == Some(row.sequence) {
                self.is_inside = true;
                self.is_decode = row.start as usize >= MARKED_TOKENS; // The prompt may be divided.
                (self.tokens, self.logits) = (own, own_logits);
            }
        }
    }
}

/// A gate that blocks while it is closed.
#[derive(Default)]
struct Gate {
    is_closed: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn close(&self) {
        *self.is_closed.lock().unwrap() = true;
    }

    fn open(&self) {
        *self.is_closed.lock().unwrap() = false;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let is_closed = self.is_closed.lock().unwrap();
        drop(self.opened.wait_while(is_closed, |is_closed| *is_closed));
    }
}

/// The real model, which tells of each batch what it has of the marked request. Each step waits at
/// the gate.
struct Watched {
    model: Model,
    marked: Arc<Mutex<Marked>>,
    gate: Arc<Gate>,
}

impl Forward for Watched {
    type KvStore = KvStore;

    fn vocabulary(&self) -> usize {
        Forward::vocabulary(&self.model)
    }

    fn new_kv_store(&self, limits: &Limits) -> io::Result<KvStore> {
        Forward::new_kv_store(&self.model, limits)
    }

    fn prepare(&mut self) -> bool {
        Forward::prepare(&mut self.model)
    }

    /// The engine asks this at the begin of a run, before the batch is seen.
    fn max_wanted_rows(&self) -> usize {
        self.marked.lock().unwrap().is_inside = false;
        Forward::max_wanted_rows(&self.model)
    }

    fn want_logits(&mut self, wanted: &WantedLogits) {
        Forward::want_logits(&mut self.model, wanted);
    }

    fn forward(&mut self, batch: &Batch, kv_store: &mut KvStore) -> impl LogitRows {
        self.gate.pass();
        self.marked.lock().unwrap().look(batch);
        Forward::forward(&mut self.model, batch, kv_store)
    }
}

struct Server {
    handle: EngineHandle,
    engine: Engine,
    marked: Arc<Mutex<Marked>>,
    gate: Arc<Gate>,
    alone: Mutex<Vec<(GenerationRequest, Vec<TokenOutput>)>>, // Answers without faults.
}

fn start(threads: usize) -> Server {
    let kernels = Kernels::new(Isa::best()).unwrap();
    let options = LoadOptions {
        exact_head_bytes: 0, // The head that is screened in 8 bits first.
        head_choice: HeadChoice::LikelyRows,
        ..LoadOptions::new(kernels, threads)
    };
    let model = Model::load(&SHAPE.in_memory(1), options).unwrap();
    let config = EngineConfig {
        limits: Limits {
            pages: 64,
            max_running: 8,
            max_queued: 64,
            max_queued_time: u64::MAX,
            step_tokens: 48,
            prefill_chunk: 32,
            max_sequence_tokens: 200,
            states: Some(StateLimits {
                slabs: 17,
                in_place_tokens: 4,
                trial_interval: 16,
            }),
            diffusion: None,
        },
        policy: Policy::default(),
        public_prefixes: Vec::new(),
        cost: Some(CostModel::UNMEASURED),
        submit_queue: 64,
        drain_limit: GUARD,
        stall_limit: Duration::ZERO,
        pin: false,
    };
    let metrics = Metrics::new(&Identity {
        model_name: "watched".into(),
        isa: "best".into(),
        kv_dtype: "f16".to_owned(),
        kv_pages: config.limits.pages,
        page_tokens: PAGE_TOKENS as u32,
    });
    let (marked, gate) = (Arc::default(), Arc::default());
    let watched = Watched {
        model,
        marked: Arc::clone(&marked),
        gate: Arc::clone(&gate),
    };
    let (handle, engine) = Engine::start(watched, config, metrics).unwrap();
    Server {
        handle,
        engine,
        marked,
        gate,
        alone: Mutex::default(),
    }
}

fn request(prompt: Vec<TokenId>, sampling: SamplingParams) -> GenerationRequest {
    GenerationRequest {
        prompt,
        sampling,
        max_new_tokens: 24,
        is_length_given: false,
        min_new_tokens: 12,
        stop_tokens: vec![3999],
        tenant: TenantId(0),
        sub_tenant: None,
        band: None,
        arrived: Instant::now(),
        first_token_within: None,
        ends_within: None,
    }
}

/// Returns three requests that decode while the marked one comes.
fn neighbours() -> Vec<GenerationRequest> {
    let prompt = |seed: u32, length: u32| (0..length).map(move |i| (i * 37 + seed * 501) % 3900);
    let plain = SamplingParams::default();
    let sampling = [
        SamplingParams::greedy(),
        SamplingParams {
            top_p: 0.9,
            logprobs: Some(2),
            frequency_penalty: 0.4,
            seed: 5,
            ..plain.clone()
        },
        SamplingParams {
            top_k: 20,
            repetition_penalty: 1.2,
            ..plain
        },
    ];
    let sampling = (1..).zip(sampling);
    sampling
        .map(|(seed, sampling)| request(prompt(seed, 10 * seed).collect(), sampling))
        .collect()
}

/// Returns the marked request, whose draws pass `place`.
fn marked(place: Place) -> GenerationRequest {
    let drawn = SamplingParams {
        temperature: 0.8,
        seed: 11,
        ..SamplingParams::default()
    };
    let sampling = match place {
        Place::LargestFound => SamplingParams { top_k: 5, ..drawn },
        Place::TokensWeighed | Place::TokenScored => SamplingParams {
            top_p: 0.9,
            ..drawn
        },
        Place::DraftAccepted => SamplingParams {
            logit_bias: vec![(REPEATED, 100.0)],
            ..SamplingParams::greedy()
        },
        _ => SamplingParams {
            logprobs: Some(3),
            logit_bias: vec![(5, 1.0), (6, -1.0)],
            repetition_penalty: 1.2,
            frequency_penalty: 0.5,
            presence_penalty: 0.1,
            ..SamplingParams::greedy()
        },
    };
    let prompt = [MARK].into_iter().chain(100..);
    request(prompt.take(MARKED_TOKENS).collect(), sampling)
}

#[derive(Debug, PartialEq)]
struct Answer {
    tokens: Vec<TokenOutput>,
    cached_tokens: u32,
    has_failed: bool,
}

async fn answer(mut stream: EventStream) -> Answer {
    let mut tokens = Vec::new();
    loop {
        let event = tokio::time::timeout(GUARD, stream.recv()).await;
        match event.expect("nothing hangs").expect("a terminal event") {
            StreamEvent::Accepted => {}
            StreamEvent::Token(output) => tokens.push(output),
            StreamEvent::Finished { cached_tokens, .. } => {
                return Answer {
                    tokens,
                    cached_tokens,
                    has_failed: false,
                };
            }
            StreamEvent::Failed(_) => {
                return Answer {
                    tokens,
                    cached_tokens: 0,
                    has_failed: true,
                };
            }
            StreamEvent::Scored(_) | StreamEvent::Embedding(_) => panic!("it asks for tokens"),
            StreamEvent::Refused(error) => panic!("{error:?}"),
            StreamEvent::DeadEnd(why) => panic!("{why}"),
        }
    }
}

impl Server {
    fn submit(&self, request: &GenerationRequest) -> EventStream {
        self.handle.submit(request.clone()).unwrap()
    }

    /// Returns the answer to a request alone, with no page cached.
    async fn alone(&self, request: &GenerationRequest) -> Vec<TokenOutput> {
        let is_same = |other: &GenerationRequest| {
            (&other.prompt, &other.sampling) == (&request.prompt, &request.sampling)
        };
        let known = {
            let answers = self.alone.lock().unwrap();
            answers.iter().find(|(other, _)| is_same(other)).cloned()
        };
        if let Some((_, tokens)) = known {
            return tokens;
        }
        self.handle.reset_prefix_cache().await.unwrap();
        let answer = answer(self.submit(request)).await;
        assert!(!answer.has_failed);
        let entry = (request.clone(), answer.tokens.clone());
        self.alone.lock().unwrap().push(entry);
        answer.tokens
    }

    /// Answers the neighbours and the marked request, the last, side by side.
    async fn together(&self, requests: &[GenerationRequest]) -> Vec<Answer> {
        self.handle.reset_prefix_cache().await.unwrap();
        self.gate.close();
        let streams: Vec<EventStream> = requests.iter().map(|one| self.submit(one)).collect();
        self.gate.open();
        let mut answers = Vec::new();
        for stream in streams {
            answers.push(answer(stream).await);
        }
        answers
    }

    /// Answers the neighbours and the marked request of `place` with a fault. Returns the answer to
    /// the marked request, and its tokens without the fault.
    async fn with_fault(&self, place: Place, fault: Arc<Hook>) -> (Answer, Vec<TokenOutput>) {
        let mut requests = neighbours();
        requests.push(marked(place));
        let mut alone = Vec::new();
        for request in &requests {
            alone.push(self.alone(request).await);
        }
        set_hook(Some(fault));
        let mut together = self.together(&requests).await;
        set_hook(None);
        let marked = (together.pop().unwrap(), alone.pop().unwrap());
        for (alone, together) in alone.iter().zip(&together) {
            assert_eq!(*alone, together.tokens, "{place:?}");
            assert!(!together.has_failed, "{place:?}");
        }
        let status = self.handle.status();
        assert_eq!((status.running, status.queued), (0, 0), "{place:?}");
        marked
    }

    fn stop(self) {
        drop(self.handle);
        self.engine.join().unwrap();
    }
}

#[tokio::test]
async fn a_place_that_panics_once_fails_no_request() {
    let _lock = ONE_AT_A_TIME.lock().await;
    let server = start(2);
    for (index, &place) in Place::ALL.iter().enumerate() {
        let (passes, fatal) = (AtomicU32::new(0), 1 + index as u32 % 4);
        let inside = Arc::clone(&server.marked);
        let (faulty, sound) = server
            .with_fault(
                place,
                Arc::new(move |at, _, _| {
                    if at == place && inside.lock().unwrap().is_inside {
                        let pass = passes.fetch_add(1, Ordering::Relaxed) + 1;
                        assert_ne!(pass, fatal, "{place:?} panics once");
                    }
                }),
            )
            .await;
        assert_eq!(faulty.tokens, sound, "{place:?}");
        assert!(!faulty.has_failed, "{place:?}");
    }
    server.stop();
}

#[tokio::test]
async fn a_request_that_makes_a_place_panic_fails_alone() {
    let _lock = ONE_AT_A_TIME.lock().await;
    let server = start(2);
    assert!(Place::ALL.len() >= 30);
    for &place in Place::ALL {
        let inside = Arc::clone(&server.marked);
        let (faulty, sound) = server
            .with_fault(
                place,
                Arc::new(move |at, _, _| {
                    let is_inside = at == place && inside.lock().unwrap().is_inside;
                    assert!(!is_inside, "{place:?} panics with the marked request");
                }),
            )
            .await;
        assert!(
            faulty.has_failed && sound.starts_with(&faulty.tokens),
            "{place:?}"
        );
        assert!(faulty.tokens.len() < sound.len(), "{place:?}");
    }
    server.stop();
}

#[tokio::test]
async fn a_request_whose_row_becomes_nan_fails_alone_and_caches_nothing() {
    let _lock = ONE_AT_A_TIME.lock().await;
    let server = start(2);
    let by_token = [
        Place::TokenEmbedded,
        Place::OutputAdded,
        Place::HeadsGathered,
        Place::GatedRowsMade,
    ];
    let by_logits = [Place::HiddenNormed, Place::LogitsCopied];
    for (place, only_decodes) in by_token
        .into_iter()
        .chain(by_logits)
        .flat_map(|place| [(place, false), (place, true)])
    {
        let inside = Arc::clone(&server.marked);
        let (faulty, sound) = server
            .with_fault(
                place,
                Arc::new(move |at, row, values| {
                    let marked = inside.lock().unwrap();
                    let rows = if by_logits.contains(&at) {
                        &marked.logits
                    } else {
                        &marked.tokens
                    };
                    let is_due = marked.is_inside && (marked.is_decode || !only_decodes);
                    if at == place && is_due && rows.contains(&row) {
                        values[values.len() / 2] = f32::NAN;
                    }
                }),
            )
            .await;
        assert!(faulty.has_failed, "{place:?}");
        assert_eq!(faulty.tokens.len(), usize::from(only_decodes), "{place:?}");
        assert!(sound.starts_with(&faulty.tokens), "{place:?}");
        let again = answer(server.submit(&marked(place))).await;
        assert_eq!(again.tokens, sound, "{place:?}");
        assert_eq!(again.cached_tokens, 0, "{place:?}");
    }
    server.stop();
}

#[tokio::test]
async fn a_place_that_stalls_is_seen_and_changes_no_answer() {
    let _lock = ONE_AT_A_TIME.lock().await;
    let server = start(2);
    for place in [
        Place::ForwardBegun,
        Place::PanelsMultiplied,
        Place::TokenStored,
        Place::HeadScreened,
        Place::LogitsCopied,
        Place::TokenDrawn,
    ] {
        let stall = Arc::new(Gate::default());
        stall.close();
        let (inside, hook_stall) = (Arc::clone(&server.marked), Arc::clone(&stall));
        let fault = Arc::new(move |at, _: usize, _: &mut [f32]| {
            if at == place && inside.lock().unwrap().is_inside {
                hook_stall.pass();
            }
        });
        let seen = async {
            while server.handle.status().healthy() || server.handle.status().running == 0 {
                tokio::task::yield_now().await;
            }
            stall.open();
        };
        let both = async { tokio::join!(server.with_fault(place, fault), seen) };
        let ((faulty, sound), ()) = tokio::time::timeout(GUARD, both).await.unwrap();
        assert_eq!(faulty.tokens, sound, "{place:?}");
        assert!(server.handle.status().healthy(), "{place:?}");
    }
    server.stop();
}

/// A hook that changes one value, the first that passes `place` in row `row`.
fn wrong_value_once(place: Place, row: usize) -> Arc<Hook> {
    let is_done = AtomicBool::new(false);
    Arc::new(move |at, at_row, values| {
        if at == place && at_row == row && !is_done.swap(true, Ordering::Relaxed) {
            values[values.len() / 2] += 0.5;
        }
    })
}

#[tokio::test]
async fn the_self_test_finds_a_wrong_value_in_every_stage() {
    let _lock = ONE_AT_A_TIME.lock().await;
    let kernels = Kernels::new(Isa::best()).unwrap();
    for exact_head_bytes in [0, usize::MAX] {
        let options = LoadOptions {
            exact_head_bytes,
            ..LoadOptions::new(kernels, 2)
        };
        let mut model = Model::load(&SHAPE.in_memory(1), options).unwrap();
        for (place, row, stage) in [
            (Place::TokenEmbedded, 2, ComparedStage::Embedding),
            (Place::OutputAdded, 3, ComparedStage::Layer(0)),
            (Place::HeadsGathered, 5, ComparedStage::Layer(0)),
            (Place::GatedRowsMade, 7, ComparedStage::Layer(0)),
            (Place::HiddenNormed, 0, ComparedStage::Head),
        ] {
            set_hook(Some(wrong_value_once(place, row)));
            let compared = model.compare_with_scalar(&[1, 2, 3, 4], u64::MAX);
            set_hook(None);
            match compared {
                Err(SelfTestError::Difference(difference)) => {
                    assert_eq!(difference.stage, stage, "{place:?}");
                    assert_eq!(difference.isa, kernels.isa());
                }
                other => panic!("{place:?}: {other:?}"),
            }
            assert!(model.compare_with_scalar(&[1, 2, 3, 4], u64::MAX).is_ok());
        }
    }
}

#[test]
fn a_server_whose_kernels_compute_wrong_values_does_not_start() {
    let _lock = ONE_AT_A_TIME.blocking_lock();
    let cli = Cli::try_parse_from(["sterna", "--port", "0", "--threads", "2"]).unwrap();
    set_hook(Some(wrong_value_once(Place::GatedRowsMade, 1)));
    let result = serve(&cli.serve);
    set_hook(None);
    let error = result.expect_err("the start fails").to_string();
    let isa = Isa::best();
    let expected = format!("the self-test failed: {isa} and plain Rust differ in layer 0: value ");
    assert!(error.starts_with(&expected), "{error}");
}

#[test]
fn no_place_is_listed_twice() {
    let places: HashSet<Place> = Place::ALL.iter().copied().collect();
    assert_eq!(places.len(), Place::ALL.len());
}

/// Every layer is a mixture of experts.
const MIXTURE: Shape = Shape {
    architecture: &QWEN3_MOE,
    group: Some(64),
    experts: Some(ExpertSizes {
        count: 8,
        used: 2,
        intermediate: 64,
    }),
    ..toy::SHAPE
};

#[test]
fn a_mixture_computes_on_after_a_panic_at_any_product() {
    let _lock = ONE_AT_A_TIME.blocking_lock();
    let options = LoadOptions::new(Kernels::new(Isa::best()).unwrap(), 2);
    let mut model = Model::load(&MIXTURE.in_memory(1), options).unwrap();
    let mut kv = model.new_kv_store(2).unwrap();
    let mut batch = Batch::new();
    let tokens: Vec<TokenId> = (40..61).collect();
    let pages = [0, 1].map(Page::new);
    batch.push_row(SequenceId::new(0, 0), 0, &tokens, &pages, 1);
    let vocabulary = MIXTURE.vocab;
    let mut step = || {
        let mut row = vec![0.0; vocabulary];
        model.forward(&batch, &mut kv).copy_row(0, &mut row);
        row
    };
    let expected = step();
    let is_product = |place| matches!(place, Place::PanelsMultiplied | Place::GatesActivated);
    let (mut panics_at, mut is_inside) = (0, true);
    while is_inside {
        let passed = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&passed);
        let hook = move |place, _, _: &mut [f32]| {
            let is_next = is_product(place) && seen.fetch_add(1, Ordering::SeqCst) == panics_at;
            assert!(!is_next, "product {panics_at}");
        };
        set_hook(Some(Arc::new(hook)));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut step));
        set_hook(None);
        is_inside = result.is_err();
        assert_eq!(step(), expected, "after a panic at product {panics_at}");
        panics_at += 1;
    }
    assert!(panics_at > 10, "only {panics_at} products");
}
