//! An engine under test, the requests that tests submit, and their answers.

use std::time::{Duration, Instant};

use sterna::engine::{
    CostModel, Engine, EngineConfig, EngineDied, EngineHandle, EventStream, FinishReason, Forward,
    GenerationRequest, Limits, Policy, SamplingParams, StreamEvent, TenantId, TokenId, TokenOutput,
};
use sterna::metrics::{Identity, Metrics};
use sterna_scheduler::PAGE_TOKENS;

use super::model::{GUARD, Gate, Recorder};

pub(crate) const PAGES: u32 = 64;

pub(crate) struct Running {
    pub(crate) handle: EngineHandle,
    pub(crate) engine: Engine,
    pub(crate) metrics: Metrics,
}

pub(crate) fn config() -> EngineConfig {
    EngineConfig {
        limits: Limits {
            pages: PAGES,
            max_running: 8,
            max_queued: 64,
            max_queued_time: u64::MAX,
            step_tokens: 48,
            prefill_chunk: 20,
            max_sequence_tokens: 300,
            states: None,
            diffusion: None,
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

pub(crate) fn metrics(config: &EngineConfig) -> Metrics {
    Metrics::new(&Identity {
        model_name: "recorder".into(),
        isa: "none".into(),
        kv_dtype: "f16".to_owned(),
        kv_pages: config.limits.pages,
        page_tokens: PAGE_TOKENS as u32,
    })
}

pub(crate) fn start_model(model: impl Forward + 'static, config: EngineConfig) -> Running {
    let metrics = metrics(&config);
    let (handle, engine) = Engine::start(model, config, metrics.clone()).expect("threads");
    Running {
        handle,
        engine,
        metrics,
    }
}

pub(crate) fn start_with(config: EngineConfig, gate: Option<Gate>) -> Running {
    start_model(Recorder { gate }, config)
}

pub(crate) fn start() -> Running {
    start_with(config(), None)
}

impl Running {
    /// Drops the last handle and waits for the end of the engine.
    pub(crate) async fn stop(self) -> Result<(), EngineDied> {
        drop(self.handle);
        let engine = self.engine;
        guarded(tokio::task::spawn_blocking(move || engine.join()))
            .await
            .expect("join does not panic")
    }

    #[track_caller]
    pub(crate) fn metric(&self, series: &str) -> f64 {
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
    pub(crate) fn finished(&self, reason: &str) -> f64 {
        self.metric(&format!(
            "vllm:request_success_total{{model_name=\"recorder\",engine=\"0\",\
             finished_reason=\"{reason}\"}}"
        ))
    }

    /// Serves one more request, which comes after all earlier messages. Then the engine is empty.
    pub(crate) async fn assert_empty(&self) {
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

pub(crate) fn request(prompt: &[TokenId], max_new_tokens: u32) -> GenerationRequest {
    GenerationRequest {
        prompt: prompt.to_vec(),
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        max_new_tokens,
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

pub(crate) fn end(
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

pub(crate) async fn guarded<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(GUARD, future)
        .await
        .expect("nothing hangs")
}

pub(crate) async fn next(stream: &mut EventStream) -> Option<StreamEvent> {
    guarded(stream.recv()).await
}

/// All events of a stream.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<TokenOutput>,
    pub(crate) end: Option<StreamEvent>,
}

impl Answer {
    pub(crate) async fn of(mut stream: EventStream) -> Answer {
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

    pub(crate) fn cached_tokens(&self) -> u32 {
        match self.end {
            Some(StreamEvent::Finished { cached_tokens, .. }) => cached_tokens,
            _ => 0,
        }
    }
}

/// Returns short and long requests: with shared prefixes, greedy and sampled, with penalties and
/// log-probabilities.
pub(crate) fn mixed_requests() -> Vec<GenerationRequest> {
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
