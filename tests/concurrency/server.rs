//! A server in the test process, with tenants, over any model.

use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use serde_json::Value;
use sterna::api::{self, App, ConnectionLimits, ModelCard, SamplingDefaults, Serving};
use sterna::engine::{
    CostModel, Engine, EngineConfig, EngineHandle, Forward, Limits, Policy, TenantId, TenantPolicy,
};
use sterna::metrics::{Identity, Metrics};
use sterna::tenants::{Deadlines, Defaults, Roster, keygen};
use sterna::text::TextFiles;
use sterna::tools::ToolFormat;
use sterna_scheduler::PAGE_TOKENS;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tower::ServiceExt;

use crate::PATIENCE;
use crate::model::{END, VOCABULARY, tokenizer_json};

/// The path that the tests send their requests to.
pub(crate) const COMPLETIONS: &str = "/v1/completions";

/// Limits under which the engine chunks, evicts and preempts nothing.
pub(crate) const ROOMY: Limits = Limits {
    pages: 1024,
    max_running: 64,
    max_queued: 4096,
    max_queued_time: u64::MAX,
    step_tokens: 2048,
    prefill_chunk: 1024,
    max_sequence_tokens: 512,
    states: None,
    diffusion: None,
};

pub(crate) struct TestServer {
    pub(crate) engine: EngineHandle,
    pub(crate) metrics: Metrics,
    pub(crate) app: App,
    pub(crate) router: Router,
    pub(crate) roster: Roster,
    /// The keys of the tenants.
    pub(crate) keys: Vec<String>,
    pages: u32,
}

/// The tokenizer and the vocabulary of a model.
pub(crate) struct ModelText<'a> {
    pub(crate) tokenizer: &'a [u8],
    pub(crate) vocabulary: u32,
    pub(crate) stop_tokens: Vec<u32>,
}

impl TestServer {
    /// Starts a server of the [`PageModel`](crate::model::PageModel) `model` for `tenants` tenants.
    pub(crate) async fn start(
        model: impl Forward + 'static,
        limits: Limits,
        max_draft: u32,
        tenants: usize,
    ) -> TestServer {
        let text = ModelText {
            tokenizer: &tokenizer_json(),
            vocabulary: VOCABULARY,
            stop_tokens: vec![END],
        };
        TestServer::of_text(model, &text, limits, max_draft, tenants).await
    }

    pub(crate) async fn of_text(
        model: impl Forward + 'static,
        text: &ModelText<'_>,
        limits: Limits,
        max_draft: u32,
        tenants: usize,
    ) -> TestServer {
        let files = TextFiles {
            tokenizer: text.tokenizer,
            config: None,
            chat_template: None,
            tool_template: None,
        };
        let (tokenizer, chat_template) = files.load(text.vocabulary).unwrap();
        let metrics = Metrics::new(&Identity {
            model_name: "pages".into(),
            isa: "none".into(),
            kv_dtype: "f16".to_owned(),
            kv_pages: limits.pages,
            page_tokens: PAGE_TOKENS as u32,
        });
        let (pages, max_model_len) = (limits.pages, limits.max_sequence_tokens);
        let config = EngineConfig {
            limits,
            policy: Policy {
                max_draft,
                ..Policy::default()
            },
            public_prefixes: Vec::new(),
            cost: Some(CostModel::UNMEASURED),
            submit_queue: 4096,
            drain_limit: PATIENCE,
            stall_limit: PATIENCE,
            pin: false,
        };
        let (engine, _threads) = Engine::start(model, config, metrics.clone()).unwrap();
        let (roster, keys) = roster(tenants);
        let app = App::for_tenants(roster.tenants(), false, 4096);
        let tokenizer = Arc::new(tokenizer);
        app.serve(Serving {
            tool_format: ToolFormat::find(chat_template.as_ref(), &tokenizer),
            model: ModelCard {
                name: "pages".into(),
                aliases: Vec::new(),
                max_model_len,
                vocabulary: text.vocabulary,
                stop_tokens: text.stop_tokens.clone(),
                ..ModelCard::default()
            },
            grammars: crate::grammars::start(&tokenizer, &[1]),
            tokenizer,
            chat_template,
            defaults: SamplingDefaults::default(),
            engine: engine.clone(),
            metrics: metrics.clone(),
        });
        let server = TestServer {
            engine,
            metrics,
            router: api::router(app.clone()),
            app,
            roster,
            keys,
            pages,
        };
        server.set_tenants(|_, policy| policy).await;
        server
    }

    /// Sets the policies of all tenants, as a reload of the tenants file does.
    pub(crate) async fn set_tenants(
        &self,
        mut change: impl FnMut(TenantId, TenantPolicy) -> TenantPolicy,
    ) {
        let policies = self.roster.policies().into_iter();
        let policies = policies.map(|(id, policy)| (id, change(id, policy)));
        let set = self.engine.set_tenants(policies.collect());
        let set = timeout(PATIENCE, set).await;
        set.expect("the engine takes policies").unwrap();
        self.app.set_tenants(self.roster.tenants());
    }

    /// Serves a real socket until the runtime ends.
    pub(crate) async fn listen(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let limits = ConnectionLimits::default();
        tokio::spawn(api::serve(
            listener,
            self.router.clone(),
            limits,
            std::future::pending(),
        ));
        address
    }

    /// Sends a request without a socket. Returns the answer's body.
    pub(crate) async fn ask(&self, tenant: usize, body: &Value) -> String {
        let request = Request::post(COMPLETIONS)
            .header("content-type", "application/json")
            .header("x-api-key", &self.keys[tenant])
            .body(Body::from(body.to_string()))
            .unwrap();
        let answering = async {
            let response = self.router.clone().oneshot(request).await.unwrap();
            let status = response.status();
            let bytes = to_bytes(response.into_body(), 64 << 20).await.unwrap();
            (status, String::from_utf8(bytes.to_vec()).unwrap())
        };
        let answered = timeout(PATIENCE, answering).await;
        let (status, text) = answered.unwrap_or_else(|_| panic!("no answer to {body}"));
        assert_eq!(status, StatusCode::OK, "{text}");
        text
    }

    /// Sends a request without a stream. Returns the answer.
    pub(crate) async fn complete(&self, tenant: usize, body: &Value) -> Value {
        serde_json::from_str(&self.ask(tenant, body).await).unwrap()
    }

    /// Returns the value of the series that begins with `name`.
    pub(crate) fn metric(&self, name: &str, label: &str) -> f64 {
        let text = self.metrics.render();
        let is_wanted = |line: &&str| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('{') && rest.contains(label))
        };
        let line = text.lines().find(is_wanted);
        let line = line.unwrap_or_else(|| panic!("{name} {label} is not in the metrics"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Waits until no request runs or waits. Then asserts that no request holds a page, and that
    /// every page is free once the prefix cache is empty.
    pub(crate) async fn assert_every_page_comes_back(&self) {
        let pages = |state: &str| self.metric("sterna_kv_pages", &format!("\"{state}\""));
        let waiting = async {
            while self.engine.status().running + self.engine.status().queued > 0
                || pages("private") + pages("tree_pinned") > 0.0
            {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            self.engine.reset_prefix_cache().await.unwrap();
            while pages("free") < f64::from(self.pages) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let came_back = timeout(PATIENCE, waiting).await;
        let states = ["free", "private", "tree_pinned", "tree_cached"].map(pages);
        came_back.unwrap_or_else(|_| panic!("pages are lost: {states:?} of {}", self.pages));
    }
}

/// Returns tenants with new keys, and the keys.
fn roster(tenants: usize) -> (Roster, Vec<String>) {
    static FILES: AtomicU32 = AtomicU32::new(0);
    let (mut file, mut keys) = (Vec::new(), Vec::new());
    for tenant in 0..tenants {
        let mut shown = Vec::new();
        let id = format!("tenant-{tenant}");
        keygen(Some(&id), &mut shown, &mut file).unwrap();
        let shown = String::from_utf8(shown).unwrap();
        keys.push(shown.lines().last().unwrap().to_owned());
    }
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let name = format!("sterna-concurrency-{}-{number}.toml", std::process::id());
    let path = std::env::temp_dir().join(name);
    fs::write(&path, file).unwrap();
    let defaults = Defaults {
        deadlines: Deadlines::default(),
        max_queued: 4096,
        max_queued_time: PATIENCE,
    };
    let roster = Roster::open(&path, defaults);
    fs::remove_file(path).unwrap();
    (roster.unwrap(), keys)
}
