//! An API router in the test process, over an engine whose model says a fixed script.
//!
//! Every answer is checked against the OpenAPI document.

mod document;
pub(crate) mod grammars;

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Method, Request, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};
use sterna::api::{self, App, ModelCard, SamplingDefaults, Serving};
use sterna::engine::{
    CostModel, Engine, EngineConfig, EngineHandle, Forward, Limits, LogitRows, Policy,
};
use sterna::metrics::{Identity, Metrics};
use sterna::text::{TextFiles, Tokenizer};
use sterna::tools::ToolFormat;
use sterna_scheduler::Batch;
use tokio::time::timeout;
use tower::ServiceExt;

pub(crate) const TOKENIZER: &[u8] = include_bytes!("../fixtures/bitnet-packed/tokenizer.json");
pub(crate) const CONFIG: &[u8] = include_bytes!("../fixtures/bitnet-packed/tokenizer_config.json");
pub(crate) const VOCABULARY: u32 = 309;
pub(crate) const END_OF_TURN: u32 = 4;
pub(crate) const MAX_MODEL_LEN: u32 = 4096;
/// The text that the model repeats. The token at each position of prompt and answer is the script's
/// token at that position.
pub(crate) const SCRIPT: &str = "Grüße, 你好 👩\u{200d}👩\u{200d}👧! One two three, naïve Привет. ";
/// A step with this token fails.
pub(crate) const POISON: u32 = 300;
/// A timeout that only a hanging test reaches.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

pub(crate) use document::Document;

// ---- the model ----

/// A model that says the script. Each step waits at the gate.
pub(crate) struct Actor {
    script: Vec<u32>,
    gate: Arc<Gate>,
}

#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
    pub(crate) failing: AtomicBool,
    /// Whether `POISON` is a token like any other.
    pub(crate) immune: AtomicBool,
    /// Whether each eighth token is the end of the turn, so that answers are short.
    pub(crate) terse: AtomicBool,
}

#[derive(Default)]
struct GateState {
    closed: bool,
    passes: u64,
    arrived: u64,
    waiting: u64,
}

impl Gate {
    pub(crate) fn close(&self) {
        self.state.lock().unwrap().closed = true;
    }

    pub(crate) fn open(&self) {
        self.state.lock().unwrap().closed = false;
        self.changed.notify_all();
    }

    /// Lets `steps` more steps through.
    pub(crate) fn pass(&self, steps: u64) {
        self.state.lock().unwrap().passes += steps;
        self.changed.notify_all();
    }

    /// Lets one step through if one waits at the gate.
    fn pass_waiting(&self) {
        let mut state = self.state.lock().unwrap();
        state.passes = state.passes.max(state.waiting);
        self.changed.notify_all();
    }

    /// Waits at the gate, on the engine thread.
    pub(crate) fn walk_through(&self) {
        let mut state = self.state.lock().unwrap();
        state.arrived += 1;
        state.waiting += 1;
        self.changed.notify_all();
        while state.closed && state.passes == 0 {
            state = self.changed.wait(state).unwrap();
        }
        state.waiting -= 1;
        state.passes = state.passes.saturating_sub(u64::from(state.closed));
    }

    /// Returns whether a step waits at the gate and the next one has not begun: its turn would take
    /// commands.
    fn holds_a_step(&self) -> bool {
        let state = self.state.lock().unwrap();
        state.closed && state.waiting > 0 && state.passes == 0
    }

    /// Waits until `steps` steps have arrived at the gate since the start.
    pub(crate) async fn arrivals(self: &Arc<Gate>, steps: u64) {
        let gate = Arc::clone(self);
        let wait = tokio::task::spawn_blocking(move || {
            let state = gate.state.lock().unwrap();
            let waited = gate
                .changed
                .wait_timeout_while(state, PATIENCE, |state| state.arrived < steps)
                .unwrap();
            assert!(!waited.1.timed_out(), "no step came");
        });
        wait.await.unwrap();
    }
}

struct ScriptRows(Vec<u32>);

impl LogitRows for ScriptRows {
    fn state_width(&self) -> usize {
        2
    }

    fn copy_state(&self, row: usize, state: &mut [f32]) {
        state.copy_from_slice(&[self.0[row] as f32, 100.0]);
    }

    fn copy_row(&self, row: usize, logits: &mut [f32]) {
        // No draw hits the other tokens, whatever the seed and the temperature are. One of them is
        // `POISON`.
        logits.fill(-30.0);
        logits[self.0[row] as usize] = 12.0;
        logits[(self.0[row] as usize + 1) % logits.len()] = 6.0;
    }
}

impl Forward for Actor {
    type KvStore = ();

    fn vocabulary(&self) -> usize {
        VOCABULARY as usize
    }

    fn new_kv_store(&self, _: &Limits) -> std::io::Result<()> {
        Ok(())
    }

    fn forward(&mut self, batch: &Batch, (): &mut ()) -> impl LogitRows {
        self.gate.walk_through();
        let poisoned = batch
            .rows()
            .iter()
            .any(|row| batch.tokens(row).contains(&POISON));
        let poisoned = poisoned && !self.gate.immune.load(Ordering::SeqCst);
        assert!(
            !poisoned && !self.gate.failing.load(Ordering::SeqCst),
            "this step was made to fail"
        );
        let is_terse = self.gate.terse.load(Ordering::SeqCst);
        let said = |position: usize| match position % 8 {
            0 if is_terse => END_OF_TURN,
            _ => self.script[position % self.script.len()],
        };
        let rows = batch.rows().iter();
        let wanted = rows.flat_map(|row| row.end() - row.logits as usize..row.end());
        ScriptRows(wanted.map(|position| said(position + 1)).collect())
    }
}

// ---- the server ----

pub(crate) struct Server {
    pub(crate) router: Router,
    pub(crate) engine: EngineHandle,
    pub(crate) metrics: Metrics,
    pub(crate) gate: Arc<Gate>,
    pub(crate) tokenizer: Arc<Tokenizer>,
}

impl Server {
    /// Starts a server without tenants.
    pub(crate) fn new() -> Server {
        Server::start(App::loading(), 8, 64)
    }

    /// Starts a server for `app`, which is still loading.
    pub(crate) fn start(app: App, max_running: u32, submit_queue: usize) -> Server {
        // Without draft tokens: the script repeats itself, so a step with draft tokens would say
        // several tokens, and no test could count steps.
        Server::drafting(app, max_running, submit_queue, 0)
    }

    pub(crate) fn drafting(
        app: App,
        max_running: u32,
        submit_queue: usize,
        max_draft: u32,
    ) -> Server {
        Server::with_limits(app, Server::limits(max_running), submit_queue, max_draft)
    }

    pub(crate) fn limits(max_running: u32) -> Limits {
        Limits {
            pages: 1024,
            max_running,
            max_queued: 64,
            max_queued_time: u64::MAX,
            step_tokens: 512,
            prefill_chunk: 512,
            max_sequence_tokens: MAX_MODEL_LEN,
            states: None,
            diffusion: None,
        }
    }

    pub(crate) fn with_limits(
        app: App,
        limits: Limits,
        submit_queue: usize,
        max_draft: u32,
    ) -> Server {
        let defaults = SamplingDefaults::default();
        Server::build(app, limits, submit_queue, max_draft, defaults)
    }

    /// Starts a server whose requests have these sampling parameters unless they say others.
    pub(crate) fn build(
        app: App,
        limits: Limits,
        submit_queue: usize,
        max_draft: u32,
        defaults: SamplingDefaults,
    ) -> Server {
        let files = TextFiles {
            tokenizer: TOKENIZER,
            config: Some(CONFIG),
            chat_template: None,
            tool_template: None,
        };
        let (tokenizer, chat_template) = files.load(VOCABULARY).unwrap();
        let tokenizer = Arc::new(tokenizer.with_context(MAX_MODEL_LEN));
        let gate = Arc::new(Gate::default());
        let actor = Actor {
            script: tokenizer.encode_prompt(SCRIPT).unwrap().split_off(1),
            gate: Arc::clone(&gate),
        };
        let identity = Identity {
            model_name: "actor".into(),
            isa: "none".into(),
            kv_dtype: "f16".to_owned(),
            kv_pages: 1024,
            page_tokens: 16,
        };
        let metrics = Metrics::new(&identity);
        let config = EngineConfig {
            limits,
            policy: Policy {
                max_draft,
                ..Policy::default()
            },
            public_prefixes: Vec::new(),
            cost: Some(CostModel::UNMEASURED),
            submit_queue,
            drain_limit: PATIENCE,
            stall_limit: PATIENCE,
            pin: false,
        };
        let (engine, _threads) = Engine::start(actor, config, metrics.clone()).unwrap();
        let model = ModelCard {
            name: "actor".into(),
            aliases: vec!["gpt-x".into()],
            max_model_len: MAX_MODEL_LEN,
            vocabulary: VOCABULARY,
            stop_tokens: vec![1, END_OF_TURN],
            architecture: "BitNetForCausalLM".into(),
            model_type: "bitnet".into(),
            owned_by: "vllm".into(),
            embedding: None,
            diffusion: None,
        };
        let stop_tokens = &model.stop_tokens;
        let grammars = grammars::start(&tokenizer, stop_tokens);
        app.serve(Serving {
            tool_format: ToolFormat::find(chat_template.as_ref(), &tokenizer),
            model,
            tokenizer: Arc::clone(&tokenizer),
            chat_template,
            defaults,
            engine: engine.clone(),
            grammars,
            metrics: metrics.clone(),
        });
        Server {
            router: api::router(app),
            engine,
            metrics,
            gate,
            tokenizer,
        }
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> Answer {
        send(&self.router, method, path, headers, body).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(Method::GET, path, &[], Body::empty()).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        let kind = [("content-type", "application/json")];
        let answer = self.send(Method::POST, path, &kind, body.to_string()).await;
        if answer.status == StatusCode::OK {
            let fault = Document::get().await.fault_of_request(path, body);
            assert_eq!(fault, None, "answered, but not as documented: {body}");
        }
        answer
    }

    pub(crate) async fn chat(&self, body: Value) -> Answer {
        self.post(
            "/v1/chat/completions",
            &merged(
                json!({"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}),
                body,
            ),
        )
        .await
    }

    pub(crate) async fn complete(&self, body: Value) -> Answer {
        self.post(
            "/v1/completions",
            &merged(json!({"prompt": "Hello", "temperature": 0}), body),
        )
        .await
    }

    /// Returns the `tokens` tokens that the actor says after `prompt_tokens` tokens, as text.
    pub(crate) fn script(&self, prompt_tokens: usize, tokens: usize) -> String {
        let script = self.tokenizer.encode_prompt(SCRIPT).unwrap().split_off(1);
        let said: Vec<u32> = (prompt_tokens..prompt_tokens + tokens)
            .map(|at| script[at % script.len()])
            .collect();
        self.tokenizer.decode(&said, true)
    }

    /// Returns the value of a metric without its own labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.metrics.render();
        let line = text
            .lines()
            .find(|line| line.starts_with(name) && !line[name.len()..].starts_with('_'))
            .unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    pub(crate) async fn until(&self, what: &str, holds: impl Fn(&Server) -> bool) {
        let waiting = async {
            while !holds(self) {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, waiting)
            .await
            .unwrap_or_else(|_| panic!("timed out waiting for: {what}"));
    }

    /// Lets steps through the closed gate until `holds` and a step waits there. The requests of a
    /// test have few tokens, so the tasks get time between two steps: a busy machine must not spend
    /// all steps before the tasks have run.
    pub(crate) async fn step_until(&self, what: &str, holds: impl Fn(&Server) -> bool) {
        const TIME_OF_TASKS: Duration = Duration::from_millis(50);
        let next_step = Cell::new(Instant::now());
        let step = |server: &Server| {
            let holds = holds(server) && server.gate.holds_a_step();
            if !holds && Instant::now() >= next_step.get() {
                server.gate.pass_waiting();
                next_step.set(Instant::now() + TIME_OF_TASKS);
            }
            holds
        };
        self.until(what, step).await;
    }
}

pub(crate) async fn send(
    router: &Router,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Body>,
) -> Answer {
    let mut request = Request::builder().method(method.clone()).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = router
        .clone()
        .oneshot(request.body(body.into()).unwrap())
        .await
        .unwrap();
    let answer = Answer::read(response).await;
    Document::get().await.check(&method, path, &answer);
    answer
}

pub(crate) fn merged(mut base: Value, more: Value) -> Value {
    base.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    base
}

pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) async fn read(response: Response) -> Answer {
        let (parts, body) = response.into_parts();
        let body = timeout(PATIENCE, to_bytes(body, 64 << 20))
            .await
            .expect("the answer ends in time")
            .unwrap();
        Answer {
            status: parts.status,
            headers: parts.headers,
            body: String::from_utf8(body.to_vec()).unwrap(),
        }
    }

    pub(crate) fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        serde_json::from_str(&self.body).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .unwrap_or_else(|| panic!("no header {name}"))
            .to_str()
            .unwrap()
    }

    /// Returns status, code and param of an error in OpenAI's format.
    pub(crate) fn error(&self) -> (u16, String, Option<String>) {
        let body: Value =
            serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no JSON: {}", self.body));
        let error = body["error"]
            .as_object()
            .unwrap_or_else(|| panic!("no error: {body}"));
        assert_eq!(
            error.keys().collect::<Vec<_>>(),
            ["message", "type", "param", "code"]
        );
        assert!(error["message"].as_str().unwrap().len() < 500, "{body}");
        let param = error["param"].as_str().map(str::to_owned);
        (
            self.status.as_u16(),
            error["code"].as_str().unwrap().to_owned(),
            param,
        )
    }

    /// Returns the objects of a stream, which must end with exactly one `[DONE]`.
    pub(crate) fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.body);
        assert_eq!(self.header("content-type"), "text/event-stream");
        assert_eq!(self.header("cache-control"), "no-cache");
        assert_eq!(self.header("x-accel-buffering"), "no");
        let frames = self.body.strip_suffix("\n\n").unwrap().split("\n\n");
        let mut data: Vec<&str> = frames
            .filter_map(|frame| frame.strip_prefix("data: "))
            .collect();
        assert_eq!(data.pop(), Some("[DONE]"));
        data.into_iter()
            .map(|data| serde_json::from_str(data).unwrap())
            .collect()
    }
}

/// Returns the text of a stream from either endpoint.
pub(crate) fn streamed_text(events: &[Value]) -> String {
    let text = |event: &Value| {
        let choice = &event["choices"][0];
        choice["delta"]["content"]
            .as_str()
            .or(choice["text"].as_str())
            .unwrap_or_default()
            .to_owned()
    };
    events.iter().map(text).collect()
}
