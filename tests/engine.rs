//! The engine through its handle: answers, refusals, early endings, faults, drain.
//!
//! The test model stores the tokens themselves in its pages and derives logits from all tokens that
//! it reads back. So a page that is shared or reused wrongly changes the answer.

use std::io;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sterna::engine::{
    CostModel, Engine, EngineConfig, EngineDied, EngineHandle, EventStream, FinishReason, Forward,
    GenerationRequest, Limits, LogitRows, Policy, Rates, Refusal, SamplingParams, StreamEvent,
    SubmitError, TenantId, TenantPolicy, TenantsRefused, TokenId, TokenOutput,
};
use sterna::metrics::{Identity, Metrics};
use sterna::model::toy;
use sterna_scheduler::{Batch, PAGE_TOKENS};

const VOCABULARY: usize = 100;
const PAGES: u32 = 64;
/// A timeout that only a hanging test reaches.
const GUARD: Duration = Duration::from_secs(60);

// ---- the model ----

/// A step with a prompt that begins with this token panics.
const PANICS: TokenId = 90;
/// After a prompt that begins with this token, the logits of every later step are NaN.
const COMPUTES_NAN: TokenId = 91;
/// The second step of a prompt that begins with this token ends the engine thread.
const KILLS_THE_THREAD: TokenId = 92;
/// The first step with more than one row panics if a prompt begins with this token.
const PANICS_IN_COMPANY: TokenId = 93;

/// A model whose pages hold the tokens themselves. Each step waits at `gate`, if there is one.
struct Recorder {
    gate: Option<Gate>,
}

/// The model's side of a gate that lets steps pass one by one.
struct Gate {
    entered: mpsc::Sender<()>,
    pass: mpsc::Receiver<()>,
}

/// The test's side of a gate.
struct Steps {
    entered: mpsc::Receiver<()>,
    pass: mpsc::Sender<()>,
}

fn gate() -> (Gate, Steps) {
    let (entered, has_entered) = mpsc::channel();
    let (let_pass, pass) = mpsc::channel();
    (
        Gate { entered, pass },
        Steps {
            entered: has_entered,
            pass: let_pass,
        },
    )
}

impl Steps {
    /// Waits until the engine is inside a step.
    fn wait_inside(&self) {
        self.entered.recv_timeout(GUARD).expect("a step begins");
    }

    fn pass_one(&self) {
        self.pass.send(()).expect("the engine waits in a step");
    }

    /// Lets this step and all later ones pass.
    fn open(self) {}
}

/// A panic payload that panics again when the engine drops it.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            panic!("a bug outside forward and sampling");
        }
    }
}

struct Histories(Vec<Vec<TokenId>>);

impl Forward for Recorder {
    type KvStore = Vec<[TokenId; PAGE_TOKENS]>;

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn new_kv_store(&self, pages: usize) -> io::Result<Self::KvStore> {
        Ok(vec![[TokenId::MAX; PAGE_TOKENS]; pages])
    }

    fn forward(&mut self, batch: &Batch, pages: &mut Self::KvStore) -> impl LogitRows {
        if let Some(gate) = &self.gate {
            // Both channels are closed once the test has opened the gate.
            let _ = gate.entered.send(());
            let _ = gate.pass.recv();
        }
        for copy in batch.copies() {
            pages[copy.to.index()] = pages[copy.from.index()];
        }
        let mut histories = Vec::new();
        for row in batch.rows() {
            let table = batch.pages(row);
            for (position, &token) in (row.start as usize..).zip(batch.tokens(row)) {
                pages[table[position / PAGE_TOKENS].index()][position % PAGE_TOKENS] = token;
            }
            let end = row.start as usize + row.len();
            let history: Vec<TokenId> = (0..end)
                .map(|position| {
                    pages[table[position / PAGE_TOKENS].index()][position % PAGE_TOKENS]
                })
                .collect();
            match history[0] {
                PANICS => panic_half_way(batch, pages),
                PANICS_IN_COMPANY if batch.rows().len() > 1 => panic_half_way(batch, pages),
                KILLS_THE_THREAD if end > 2 => std::panic::panic_any(Bomb),
                _ => {}
            }
            let wanted = end - row.logits as usize..end;
            histories.extend(wanted.map(|position| history[..=position].to_vec()));
        }
        Histories(histories)
    }
}

/// Panics after wrong tokens were written wherever the batch may write.
fn panic_half_way(batch: &Batch, pages: &mut [[TokenId; PAGE_TOKENS]]) -> ! {
    for row in batch.rows() {
        for position in row.start as usize..row.end() {
            let page = batch.pages(row)[position / PAGE_TOKENS];
            pages[page.index()][position % PAGE_TOKENS] = TokenId::MAX;
        }
    }
    panic!("a prompt that makes the model panic");
}

impl LogitRows for Histories {
    fn copy_row(&self, row: usize, logits: &mut [f32]) {
        let history = &self.0[row];
        if history[0] == COMPUTES_NAN && history.len() > 2 {
            return logits.fill(f32::NAN);
        }
        let hash = history
            .iter()
            .fold(0x1234_5678_9ABC_DEF1, |hash: u64, &token| {
                mix(hash ^ u64::from(token))
            });
        for (token, logit) in (0..).zip(logits) {
            *logit = (mix(hash ^ (token << 32)) >> 40) as f32 / (1 << 21) as f32;
        }
    }
}

fn mix(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    bits ^ (bits >> 29)
}

// ---- the engine under test ----

struct Running {
    handle: EngineHandle,
    engine: Engine,
    metrics: Metrics,
}

fn config() -> EngineConfig {
    EngineConfig {
        limits: Limits {
            pages: PAGES,
            max_running: 8,
            max_queued: 64,
            max_queued_time: u64::MAX,
            step_tokens: 48,
            prefill_chunk: 20,
            max_sequence_tokens: 300,
        },
        policy: Policy::default(),
        public_prefixes: Vec::new(),
        cost: Some(CostModel::UNMEASURED),
        submit_queue: 64,
        drain_limit: GUARD,
        stall_limit: GUARD,
        pin: false,
    }
}

fn metrics(config: &EngineConfig) -> Metrics {
    Metrics::new(&Identity {
        model_name: "recorder".into(),
        isa: "none".into(),
        kv_pages: config.limits.pages,
        page_tokens: PAGE_TOKENS as u32,
    })
}

fn start_model(model: impl Forward + 'static, config: EngineConfig) -> Running {
    let metrics = metrics(&config);
    let (handle, engine) = Engine::start(model, config, metrics.clone()).expect("threads");
    Running {
        handle,
        engine,
        metrics,
    }
}

fn start_with(config: EngineConfig, gate: Option<Gate>) -> Running {
    start_model(Recorder { gate }, config)
}

fn start() -> Running {
    start_with(config(), None)
}

impl Running {
    /// Drops the last handle and waits for the end of the engine.
    async fn stop(self) -> Result<(), EngineDied> {
        drop(self.handle);
        let engine = self.engine;
        guarded(tokio::task::spawn_blocking(move || engine.join()))
            .await
            .expect("join does not panic")
    }

    #[track_caller]
    fn metric(&self, series: &str) -> f64 {
        let text = self.metrics.render();
        let line = text
            .lines()
            .find(|line| line.starts_with(series))
            .unwrap_or_else(|| panic!("no {series}\n{text}"));
        let value = line.rsplit(' ').next().expect("a value ends the line");
        value.parse().expect("the value is a number")
    }

    /// Returns the number of requests that finished for a reason.
    #[track_caller]
    fn finished(&self, reason: &str) -> f64 {
        self.metric(&format!(
            "vllm:request_success_total{{model_name=\"recorder\",engine=\"0\",\
             finished_reason=\"{reason}\"}}"
        ))
    }

    /// Serves one more request, which comes after all earlier messages. Then the engine is empty.
    async fn assert_empty(&self) {
        let probe = self.handle.submit(request(&[1, 2, 3], 2));
        let probe = Answer::of(probe.expect("there is room")).await;
        assert_eq!(
            probe.end,
            Some(end(FinishReason::Length, 3, probe.cached_tokens(), 2))
        );
        assert_eq!(self.metric("vllm:num_requests_running"), 0.0);
        assert_eq!(self.metric("vllm:num_requests_waiting"), 0.0);
        assert_eq!(self.metric("vllm:kv_cache_usage_perc"), 0.0);
        let status = self.handle.status();
        assert_eq!(
            (status.running, status.queued, status.stalled_for),
            (0, 0, Duration::ZERO)
        );
        assert!(status.healthy());
    }
}

fn request(prompt: &[TokenId], max_new_tokens: u32) -> GenerationRequest {
    GenerationRequest {
        prompt: prompt.to_vec(),
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        max_new_tokens,
        min_new_tokens: 0,
        stop_tokens: Vec::new(),
        tenant: TenantId(0),
        arrived: Instant::now(),
        first_token_within: None,
        ends_within: None,
    }
}

fn end(
    reason: FinishReason,
    prompt_tokens: u32,
    cached_tokens: u32,
    completion_tokens: u32,
) -> StreamEvent {
    StreamEvent::Finished {
        reason,
        prompt_tokens,
        cached_tokens,
        completion_tokens,
    }
}

async fn guarded<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(GUARD, future)
        .await
        .expect("nothing hangs")
}

async fn next(stream: &mut EventStream) -> Option<StreamEvent> {
    guarded(stream.recv()).await
}

/// All events of a stream.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    tokens: Vec<TokenOutput>,
    end: Option<StreamEvent>,
}

impl Answer {
    async fn of(mut stream: EventStream) -> Answer {
        let mut answer = Answer::default();
        let mut accepted = false;
        while let Some(event) = next(&mut stream).await {
            assert_eq!(answer.end, None, "the terminal event is the last");
            match event {
                StreamEvent::Accepted => {
                    assert!(!std::mem::replace(&mut accepted, true), "accepted once")
                }
                StreamEvent::Token(output) => {
                    assert!(accepted, "accepted before the first token");
                    answer.tokens.push(output);
                }
                terminal => answer.end = Some(terminal),
            }
        }
        assert!(answer.end.is_some(), "a stream ends with a terminal event");
        answer
    }

    fn cached_tokens(&self) -> u32 {
        match self.end {
            Some(StreamEvent::Finished { cached_tokens, .. }) => cached_tokens,
            _ => 0,
        }
    }
}

/// Returns short and long requests: with shared prefixes, greedy and sampled, with penalties and
/// log-probabilities.
fn mixed_requests() -> Vec<GenerationRequest> {
    (0..40_u32)
        .map(|i| {
            let shared = (0..(i % 4) * 15).map(|t| t % 50);
            let own = (0..1 + (i * 7) % 60).map(|t| (t * 13 + i) % 80);
            let mut request = request(&shared.chain(own).collect::<Vec<_>>(), 1 + (i * 11) % 90);
            request.sampling.seed = u64::from(i);
            request.sampling.temperature = if i % 3 == 0 { 0.0 } else { 0.8 };
            request.sampling.logprobs = (i % 2 == 0).then_some(i % 5);
            request.sampling.repetition_penalty = if i % 5 == 0 { 1.3 } else { 1.0 };
            request.sampling.frequency_penalty = if i % 7 == 0 { 0.5 } else { 0.0 };
            request.sampling.top_p = if i % 4 == 1 { 0.9 } else { 1.0 };
            request.sampling.top_k = if i % 6 == 1 { 10 } else { 0 };
            request
        })
        .collect()
}

// ---- answers ----

/// Answers the mixed requests one after the other with a cold cache on one thread, then all at once
/// with too few pages on two threads.
async fn check_batching<F: Forward + 'static>(model: impl Fn(usize) -> F) {
    let mut alone = Vec::new();
    let running = start_model(model(1), config());
    for request in mixed_requests() {
        running.handle.reset_prefix_cache();
        let stream = running.handle.submit(request).expect("there is room");
        let answer = Answer::of(stream).await;
        assert_eq!(answer.cached_tokens(), 0);
        alone.push(answer.tokens);
    }
    let mut crowded = config();
    crowded.limits.pages = 20;
    let running = start_model(model(2), crowded);
    let streams: Vec<EventStream> = mixed_requests()
        .into_iter()
        .map(|request| running.handle.submit(request).expect("there is room"))
        .collect();
    for (stream, expected) in streams.into_iter().zip(alone) {
        assert_eq!(Answer::of(stream).await.tokens, expected);
    }
    for occurred in [
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "sterna_evictions_total",
    ] {
        assert!(running.metric(occurred) > 0.0, "{occurred}");
    }
    running.assert_empty().await;
}

#[tokio::test]
async fn requests_answer_alike_alone_and_batched() {
    check_batching(|_threads| Recorder { gate: None }).await;
}

#[tokio::test]
async fn requests_of_a_real_model_answer_alike_alone_and_batched() {
    check_batching(toy::model).await;
}

#[tokio::test]
async fn an_answer_ends_at_a_stop_token_or_at_its_length() {
    let running = start();
    let whole = Answer::of(running.handle.submit(request(&[5, 6], 12)).unwrap()).await;
    assert_eq!(whole.tokens.len(), 12);
    assert_eq!(whole.end, Some(end(FinishReason::Length, 2, 0, 12)));

    let stop = whole.tokens[4].token;
    let first = whole
        .tokens
        .iter()
        .position(|output| output.token == stop)
        .unwrap();
    let stopping = GenerationRequest {
        stop_tokens: vec![stop],
        ..request(&[5, 6], 12)
    };
    let stopped = Answer::of(running.handle.submit(stopping.clone()).unwrap()).await;
    assert_eq!(
        stopped.tokens,
        whole.tokens[..=first],
        "the stop token is reported"
    );
    assert_eq!(
        stopped.end,
        Some(end(FinishReason::Stop, 2, 1, first as u32 + 1))
    );

    let too_short_to_stop = GenerationRequest {
        min_new_tokens: 12,
        ..stopping
    };
    let answer = Answer::of(running.handle.submit(too_short_to_stop).unwrap()).await;
    assert_eq!(answer.tokens.len(), 12);
    assert!(answer.tokens.iter().all(|output| output.token != stop));
    assert_eq!(running.finished("stop"), 1.0);
}

#[tokio::test]
async fn logprobs_have_the_requested_number_of_tokens() {
    let running = start();
    let mut wanted = request(&[1], 3);
    wanted.sampling.logprobs = Some(2);
    let answer = Answer::of(running.handle.submit(wanted).unwrap()).await;
    for output in answer.tokens {
        assert_eq!(output.top.len(), 2);
        assert_eq!(
            output.top[0],
            (output.token, output.logprob.unwrap()),
            "greedy takes the most likely"
        );
    }
}

// ---- early endings ----

#[tokio::test]
async fn requests_of_disconnected_clients_leave_no_state() {
    let running = start();
    let mut streams = Vec::new();
    for (i, request) in mixed_requests().into_iter().enumerate() {
        let mut stream = running
            .handle
            .submit(GenerationRequest {
                max_new_tokens: 100,
                ..request
            })
            .unwrap();
        for _ in 0..i % 6 {
            next(&mut stream).await;
        }
        if i % 4 == 0 {
            streams.push(stream); // These are dropped at once, at the end.
        }
    }
    drop(streams);
    running.assert_empty().await;
    assert_eq!(running.metric("sterna_client_disconnects_total"), 40.0);
    running.stop().await.unwrap();
}

#[tokio::test]
async fn a_cancel_that_overtakes_its_submission_takes_effect() {
    let (gate, steps) = gate();
    let running = start_with(config(), Some(gate));
    let first = running.handle.submit(request(&[1], 1)).unwrap();
    steps.wait_inside();
    drop(running.handle.submit(request(&[2], 50)).unwrap());
    steps.open();
    assert_eq!(Answer::of(first).await.tokens.len(), 1);
    running.assert_empty().await;
    assert_eq!(
        running.metric("vllm:generation_tokens_total"),
        3.0,
        "the cancelled request has none"
    );
}

#[tokio::test]
async fn finish_counts_the_tokens_received_so_far() {
    let (gate, steps) = gate();
    let running = start_with(config(), Some(gate));
    let mut stream = running.handle.submit(request(&[7, 8, 9], 50)).unwrap();
    for _ in 0..4 {
        steps.wait_inside();
        steps.pass_one();
    }
    guarded(stream.accepted()).await.unwrap();
    for _ in 0..2 {
        assert!(matches!(
            next(&mut stream).await,
            Some(StreamEvent::Token(_))
        ));
    }
    stream.finish(FinishReason::Stop);
    steps.open();
    assert_eq!(
        next(&mut stream).await,
        Some(end(FinishReason::Stop, 3, 0, 2)),
        "the stream drops later tokens"
    );
    assert_eq!(next(&mut stream).await, None);
    drop(stream);
    running.assert_empty().await;
    assert_eq!(running.metric("sterna_client_disconnects_total"), 0.0);
}

#[tokio::test]
async fn a_failure_after_finish_does_not_change_the_answer() {
    for fatal in [COMPUTES_NAN, KILLS_THE_THREAD] {
        let (gate, steps) = gate();
        let running = start_with(config(), Some(gate));
        let mut stream = running.handle.submit(request(&[fatal, 2], 20)).unwrap();
        steps.wait_inside();
        steps.pass_one();
        guarded(stream.accepted()).await.unwrap();
        assert!(matches!(
            next(&mut stream).await,
            Some(StreamEvent::Token(_))
        ));
        steps.wait_inside();
        stream.finish(FinishReason::Stop);
        steps.open();
        assert_eq!(
            next(&mut stream).await,
            Some(end(FinishReason::Stop, 2, 0, 1))
        );
        assert_eq!(next(&mut stream).await, None);
    }
}

#[tokio::test]
async fn an_early_end_reports_the_cached_tokens() {
    let running = start();
    let prompt: Vec<TokenId> = (0..40).collect();
    let cold = Answer::of(running.handle.submit(request(&prompt, 1)).unwrap()).await;
    assert_eq!(cold.cached_tokens(), 0);
    let warm = Answer::of(running.handle.submit(request(&prompt, 1)).unwrap()).await;
    assert!(warm.cached_tokens() > 0);
    let mut stream = running.handle.submit(request(&prompt, 200)).unwrap();
    guarded(stream.accepted()).await.unwrap();
    assert!(matches!(
        next(&mut stream).await,
        Some(StreamEvent::Token(_))
    ));
    stream.finish(FinishReason::Stop);
    assert_eq!(
        next(&mut stream).await,
        Some(end(FinishReason::Stop, 40, warm.cached_tokens(), 1))
    );
}

// ---- refusals ----

#[tokio::test]
async fn a_full_submit_queue_refuses_at_once_and_a_full_scheduler_within_a_step() {
    let (gate, steps) = gate();
    let mut small = config();
    small.submit_queue = 2;
    small.limits.max_queued = 1;
    small.limits.max_running = 1;
    let running = start_with(small, Some(gate));
    let first = running.handle.submit(request(&[1], 1)).unwrap();
    steps.wait_inside(); // The engine takes no submission now.
    let waiting = running.handle.submit(request(&[2], 1)).unwrap();
    let mut too_many = running.handle.submit(request(&[3], 1)).unwrap();
    match running.handle.submit(request(&[4], 1)).map(|_| ()) {
        Err(SubmitError::Refused(Refusal::Overloaded { retry_after })) => {
            assert!(retry_after >= 1_000_000);
        }
        other => panic!("the submit queue is full, yet {other:?}"),
    }
    // The scheduler accepts one of the two submissions.
    steps.open();
    let refused = guarded(too_many.accepted());
    assert!(matches!(
        refused.await,
        Err(SubmitError::Refused(Refusal::Overloaded { .. }))
    ));
    assert_eq!(next(&mut too_many).await, None);
    assert_eq!(Answer::of(first).await.tokens.len(), 1);
    assert_eq!(Answer::of(waiting).await.tokens.len(), 1);
    running.assert_empty().await;
    assert_eq!(
        running.metric(
            "sterna_refusals_total{model_name=\"recorder\",engine=\"0\",reason=\"queue_full\"}"
        ),
        2.0
    );
}

#[tokio::test]
async fn a_tenants_flood_leaves_room_in_the_submit_queue_for_others() {
    let (gate, steps) = gate();
    let running = start_with(config(), Some(gate)); // A quarter of the submit queue is 16.
    let tenants = [1, 2].map(|id| (TenantId(id), TenantPolicy::default()));
    let set = running.handle.set_tenants(tenants.to_vec());
    assert_eq!(guarded(set).await, Ok(()));
    let submit = |id: u32| {
        running.handle.submit(GenerationRequest {
            tenant: TenantId(id),
            ..request(&[1], 1)
        })
    };
    let mut streams = vec![submit(0).unwrap()];
    steps.wait_inside(); // The engine takes no submission now.
    streams.extend((0..16).map(|_| submit(1).unwrap()));
    match submit(1).map(|_| ()) {
        Err(SubmitError::Refused(Refusal::TenantQueueFull { retry_after })) => {
            assert!(retry_after >= 1_000_000);
        }
        other => panic!("its quota is used up, yet {other:?}"),
    }
    streams.push(submit(2).unwrap());
    streams.extend((0..47).map(|_| submit(0).unwrap()));
    let full = submit(0).map(|_| ());
    assert!(
        matches!(full, Err(SubmitError::Refused(Refusal::Overloaded { .. }))),
        "{full:?}"
    );
    // The queue is full. The newest submissions of the tenant with the most of it leave.
    streams.extend((1..16).map(|_| submit(2).unwrap()));
    let own = submit(2).map(|_| ());
    assert!(
        matches!(
            own,
            Err(SubmitError::Refused(Refusal::TenantQueueFull { .. }))
        ),
        "{own:?}"
    );
    steps.open();
    let mut displaced = Vec::new();
    for (index, stream) in streams.into_iter().enumerate() {
        let answer = Answer::of(stream).await;
        let refused = |end| matches!(end, StreamEvent::Refused(SubmitError::Refused(_)));
        displaced.extend(answer.end.is_some_and(refused).then_some(index));
    }
    let newest = 18 + 47 - 15..18 + 47;
    assert_eq!(displaced, newest.collect::<Vec<_>>());
    // Submissions that were taken or refused do not count any more.
    for _ in 0..40 {
        for id in [1, 2] {
            Answer::of(submit(id).unwrap()).await;
        }
    }
}

#[tokio::test]
async fn invalid_requests_are_refused_with_a_reason() {
    let running = start();
    let refusal = |request| running.handle.submit(request).map(|_| ()).unwrap_err();
    assert_eq!(refusal(request(&[], 1)), Refusal::EmptyPrompt.into());
    assert_eq!(
        refusal(request(&[1, VOCABULARY as TokenId], 1)),
        SubmitError::UnknownToken(VOCABULARY as TokenId)
    );
    assert_eq!(refusal(request(&[1], 0)), Refusal::NothingToGenerate.into());
    let stop = GenerationRequest {
        stop_tokens: vec![777],
        ..request(&[1], 1)
    };
    assert_eq!(refusal(stop), SubmitError::UnknownToken(777));
    let with = |change: fn(&mut SamplingParams)| {
        let mut request = request(&[1], 1);
        change(&mut request.sampling);
        request
    };
    for (name, bad) in [
        (
            "temperature",
            with(|sampling| sampling.temperature = f32::NAN),
        ),
        ("temperature", with(|sampling| sampling.temperature = -1.0)),
        (
            "repetition_penalty",
            with(|sampling| sampling.repetition_penalty = 0.0),
        ),
        (
            "repetition_penalty",
            with(|sampling| sampling.repetition_penalty = f32::from_bits(1)),
        ),
        (
            "repetition_penalty",
            with(|sampling| sampling.repetition_penalty = 100.1),
        ),
        (
            "repetition_penalty",
            with(|sampling| sampling.repetition_penalty = f32::NAN),
        ),
        (
            "logit_bias",
            with(|sampling| sampling.logit_bias = vec![(1, f32::INFINITY)]),
        ),
        ("logprobs", with(|sampling| sampling.logprobs = Some(21))),
    ] {
        assert_eq!(refusal(bad), SubmitError::InvalidSampling(name));
    }
    let mut stream = running.handle.submit(request(&[1; 250], 200)).unwrap();
    assert!(matches!(
        guarded(stream.accepted()).await,
        Err(SubmitError::Refused(Refusal::TooLong {
            needed_tokens: 450..,
            ..
        }))
    ));
    assert_eq!(next(&mut stream).await, None);
    running.assert_empty().await;
}

// ---- faults ----

#[tokio::test]
async fn a_panicking_step_fails_its_requests_and_serving_continues() {
    let running = start();
    for _ in 0..3 {
        let answer = Answer::of(running.handle.submit(request(&[PANICS, 1], 5)).unwrap()).await;
        assert!(
            matches!(answer.end, Some(StreamEvent::Failed(_))),
            "{answer:?}"
        );
        assert_eq!(answer.tokens, []);
        running.assert_empty().await;
    }
    assert_eq!(running.finished("error"), 3.0);
    running.stop().await.unwrap();
}

/// Answers requests one after the other, then all at once, and returns both.
async fn alone_and_together(requests: &[GenerationRequest]) -> [Vec<Answer>; 2] {
    let running = start();
    let mut alone = Vec::new();
    for request in requests {
        running.handle.reset_prefix_cache();
        let stream = running
            .handle
            .submit(request.clone())
            .expect("the engine runs");
        alone.push(Answer::of(stream).await);
    }
    let (gate, steps) = gate();
    let running = start_with(config(), Some(gate));
    let submit = |request: &GenerationRequest| {
        running
            .handle
            .submit(request.clone())
            .expect("the engine runs")
    };
    let streams: Vec<EventStream> = requests.iter().map(submit).collect();
    steps.open();
    let mut together = Vec::new();
    for stream in streams {
        together.push(Answer::of(stream).await);
    }
    running.assert_empty().await;
    running.stop().await.expect("the engine runs");
    [alone, together]
}

#[tokio::test]
async fn only_the_request_that_panics_alone_fails_and_its_neighbours_do_not_change() {
    // Two prompts of several chunks, and six answers that go on for long. Each prompt that panics
    // meets decodes and chunks of the others.
    for fatal in [vec![PANICS; 3], vec![PANICS; 45]] {
        let mut requests = mixed_requests()[10..17].to_vec();
        requests.insert(3, request(&fatal, 20));
        let [alone, together] = alone_and_together(&requests).await;
        for (index, (alone, together)) in alone.iter().zip(&together).enumerate() {
            assert_eq!(alone.tokens, together.tokens, "request {index}");
            let has_failed = matches!(together.end, Some(StreamEvent::Failed(_)));
            assert_eq!(has_failed, index == 3, "{together:?}");
        }
    }
}

#[tokio::test]
async fn no_request_fails_if_a_step_panics_and_each_of_its_rows_alone_does_not() {
    let mut requests = mixed_requests()[10..17].to_vec();
    requests.insert(2, request(&[PANICS_IN_COMPANY, 5, 6], 30));
    let [alone, together] = alone_and_together(&requests).await;
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!(alone.tokens, together.tokens);
        assert!(matches!(together.end, Some(StreamEvent::Finished { .. })));
    }
}

#[tokio::test]
async fn a_row_with_nan_fails_only_its_own_request() {
    let running = start();
    let expected = Answer::of(running.handle.submit(request(&[1, 2], 20)).unwrap()).await;
    let (gate, steps) = gate();
    let running = start_with(config(), Some(gate));
    let good = running.handle.submit(request(&[1, 2], 20)).unwrap();
    let bad = running
        .handle
        .submit(request(&[COMPUTES_NAN, 2], 20))
        .unwrap();
    steps.open();
    let bad = Answer::of(bad).await;
    assert_eq!(bad.tokens.len(), 1);
    assert!(matches!(bad.end, Some(StreamEvent::Failed(_))));
    assert_eq!(Answer::of(good).await.tokens, expected.tokens);
    running.assert_empty().await;
}

#[tokio::test]
async fn a_dead_engine_ends_every_stream_and_refuses_new_requests() {
    let (gate, steps) = gate();
    let running = start_with(config(), Some(gate));
    let fatal = running
        .handle
        .submit(request(&[KILLS_THE_THREAD, 1], 5))
        .unwrap();
    steps.wait_inside();
    let queued = running.handle.submit(request(&[1], 5)).unwrap();
    steps.open();
    assert!(matches!(
        Answer::of(fatal).await.end,
        Some(StreamEvent::Failed(_))
    ));
    assert_eq!(
        Answer::of(queued).await.end,
        Some(StreamEvent::Refused(SubmitError::Dead))
    );
    assert_eq!(
        running.handle.submit(request(&[1], 5)).map(|_| ()),
        Err(SubmitError::Dead)
    );
    let status = running.handle.status();
    assert!(!status.healthy() && !status.ready());
    assert_eq!(running.stop().await, Err(EngineDied));
}

#[tokio::test]
async fn a_stalled_step_makes_the_status_unhealthy() {
    let (gate, steps) = gate();
    let running = start_with(
        EngineConfig {
            stall_limit: Duration::ZERO,
            ..config()
        },
        Some(gate),
    );
    assert!(running.handle.status().healthy(), "idle is healthy");
    let stream = running.handle.submit(request(&[1], 1)).unwrap();
    steps.wait_inside();
    guarded(async {
        while running.handle.status().healthy() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    steps.open();
    assert_eq!(Answer::of(stream).await.tokens.len(), 1);
    assert!(running.handle.status().healthy());
    assert_eq!(running.handle.status().steps, 1);
}

/// A model without enough memory for its KV store.
struct TooLarge;

impl Forward for TooLarge {
    type KvStore = ();

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn new_kv_store(&self, _pages: usize) -> io::Result<()> {
        Err(io::ErrorKind::OutOfMemory.into())
    }

    fn forward(&mut self, _batch: &Batch, (): &mut ()) -> impl LogitRows {
        Histories(Vec::new())
    }
}

#[test]
fn start_fails_if_the_kv_store_does_not_fit() {
    let started = Engine::start(TooLarge, config(), metrics(&config()));
    let error = started.map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
}

#[tokio::test]
async fn tenants_can_be_set_until_the_engine_has_ended() {
    let running = start();
    let tenants = vec![(TenantId(1), TenantPolicy::default())];
    let set = running.handle.set_tenants(tenants.clone());
    assert_eq!(guarded(set).await, Ok(()));
    let of_tenant = GenerationRequest {
        tenant: TenantId(1),
        ..request(&[1, 2, 3], 2)
    };
    let mut stream = running.handle.submit(of_tenant).unwrap();
    assert_eq!(stream.rates(), None, "the engine has not answered yet");
    guarded(stream.accepted()).await.unwrap();
    assert_eq!(
        stream.rates(),
        Some(Rates::default()),
        "the tenant has no rates"
    );
    while next(&mut stream).await.is_some() {}

    let handle = running.handle.clone();
    handle.drain();
    running.stop().await.unwrap();
    let set = handle.set_tenants(tenants);
    assert_eq!(guarded(set).await, Err(TenantsRefused::Gone));
}

// ---- the end ----

#[tokio::test]
async fn a_drain_finishes_accepted_requests_and_refuses_new_ones() {
    let (gate, steps) = gate();
    let mut narrow = config();
    narrow.limits.max_running = 2;
    let running = start_with(narrow, Some(gate));
    let mut accepted: Vec<EventStream> = (0..5)
        .map(|i| running.handle.submit(request(&[i], 6)).unwrap())
        .collect();
    steps.wait_inside();
    steps.pass_one();
    for stream in &mut accepted {
        guarded(stream.accepted()).await.unwrap();
    }
    running.handle.drain();
    assert!(running.handle.status().draining && !running.handle.status().ready());
    assert_eq!(
        running.handle.submit(request(&[1], 1)).map(|_| ()),
        Err(Refusal::Draining.into())
    );
    steps.open();
    for mut stream in accepted {
        let mut tokens = 0;
        loop {
            match next(&mut stream).await {
                Some(StreamEvent::Token(_)) => tokens += 1,
                Some(StreamEvent::Finished { reason, .. }) => {
                    break assert_eq!(reason, FinishReason::Length);
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(tokens, 6);
    }
    let handle = running.handle.clone();
    assert_eq!(running.stop().await, Ok(()));
    assert_eq!(
        handle.submit(request(&[1], 1)).map(|_| ()),
        Err(Refusal::Draining.into())
    );
    let status = handle.status();
    assert!(status.healthy() && !status.ready(), "the drain ended well");
}

#[tokio::test]
async fn a_drain_without_limit_finishes_queued_submissions() {
    let (gate, steps) = gate();
    let mut unlimited = config();
    unlimited.drain_limit = Duration::MAX;
    let running = start_with(unlimited, Some(gate));
    let first = running.handle.submit(request(&[1], 6)).unwrap();
    steps.wait_inside(); // The engine takes no submission now.
    let queued = running.handle.submit(request(&[2, 3], 6)).unwrap();
    running.handle.drain();
    steps.open();
    let first = Answer::of(first).await;
    assert_eq!(first.end, Some(end(FinishReason::Length, 1, 0, 6)));
    let second = Answer::of(queued).await;
    assert_eq!(second.end, Some(end(FinishReason::Length, 2, 0, 6)));
    assert_eq!(running.stop().await, Ok(()));
}

#[tokio::test]
async fn a_drain_past_its_limit_ends_the_remaining_requests() {
    let (gate, steps) = gate();
    let running = start_with(
        EngineConfig {
            drain_limit: Duration::ZERO,
            ..config()
        },
        Some(gate),
    );
    let mut stream = running.handle.submit(request(&[1, 2], 200)).unwrap();
    steps.wait_inside();
    running.handle.drain();
    steps.open();
    guarded(stream.accepted()).await.unwrap();
    let mut received = 0;
    let last = loop {
        match next(&mut stream).await {
            Some(StreamEvent::Token(_)) => received += 1,
            other => break other,
        }
    };
    assert_eq!(last, Some(end(FinishReason::Shutdown, 2, 0, received)));
    assert!(received < 200);
    assert_eq!(running.stop().await, Ok(()));
}

#[tokio::test]
async fn the_engine_ends_when_its_last_handle_is_dropped() {
    let running = start();
    let stream = running.handle.submit(request(&[1], 200)).unwrap();
    drop(stream);
    assert_eq!(running.stop().await, Ok(()));
}

#[tokio::test]
async fn a_stream_outlives_the_last_handle() {
    let running = start();
    let mut stream = running.handle.submit(request(&[1], 5)).unwrap();
    let Running { handle, engine, .. } = running;
    drop(handle);
    let mut last = None;
    while let Some(event) = next(&mut stream).await {
        last = Some(event);
    }
    assert_eq!(last, Some(end(FinishReason::Length, 1, 0, 5)));
    let ended = tokio::task::spawn_blocking(move || engine.join());
    assert!(
        !ended.is_finished(),
        "the engine lives as long as the stream"
    );
    drop(stream);
    assert_eq!(guarded(ended).await.unwrap(), Ok(()));
}

#[tokio::test]
async fn streams_may_be_read_on_other_tasks() {
    let running = start();
    let answers = Arc::new(Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..16)
        .map(|i| {
            let (handle, answers) = (running.handle.clone(), Arc::clone(&answers));
            tokio::spawn(async move {
                let answer = Answer::of(handle.submit(request(&[i], 8)).unwrap()).await;
                answers.lock().unwrap().push(answer.tokens.len());
            })
        })
        .collect();
    for task in tasks {
        guarded(task).await.unwrap();
    }
    assert_eq!(*answers.lock().unwrap(), [8; 16]);
    running.assert_empty().await;
}
