//! The state that all handlers share: the served model, the tenants and their limits.

use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;

use crate::api::body::limits::BodyLimits;
use crate::api::connection::ConnectionLimits;
use crate::api::error::ApiError;
use crate::api::fields::sampling_defaults::SamplingDefaults;
use crate::api::generation::running::RunningRequests;
use crate::api::ids::unix_seconds;
use crate::api::middleware::access::Access;
use crate::api::middleware::rate_headers::LastRates;
use crate::constraint::Grammars;
use crate::engine::{EngineHandle, Pooling, TokenId, Unmasking};
use crate::metrics::Metrics;
use crate::tenants::{Deadlines, KeyHolder, Tenant, Tenants};
use crate::text::{ChatTemplate, Tokenizer};
use crate::tools::ToolFormat;
use crate::traces::TraceSink;

/// The names and limits of the served model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelCard {
    /// The model's name in the API.
    pub name: String,
    /// Further names of the model; it always answers to `default` too.
    pub aliases: Vec<String>,
    /// The context length: the maximum number of prompt and output tokens together.
    pub max_model_len: u32,
    /// The number of tokens in the vocabulary.
    pub vocabulary: u32,
    /// Tokens that end an answer.
    pub stop_tokens: Vec<TokenId>,
    /// The class in `architectures` of its `config.json`.
    pub architecture: String,
    /// The `model_type` of its `config.json`.
    pub model_type: String,
    /// Its `owned_by` in the list of models. Routers tell from it whose API to use.
    pub owned_by: String,
    /// How texts become embeddings, if the model computes these and no text.
    pub embedding: Option<EmbeddingShape>,
    /// How the model answers by block diffusion, if it can.
    pub diffusion: Option<DiffusionCard>,
}

/// How a model answers by block diffusion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiffusionCard {
    /// Which tokens stay after a pass.
    pub unmasking: Unmasking,
    /// The tokens of a block.
    pub block: u32,
    /// Whether the model does so if a request does not choose.
    pub is_default: bool,
    /// Whether the model cannot answer otherwise.
    pub is_only: bool,
}

/// What a model's name ends with if a request chooses block diffusion.
const DIFFUSION: &str = ":diffusion";

/// What a model's name ends with if a request chooses the other way of decoding.
const AUTOREGRESSIVE: &str = ":autoregressive";

/// How the texts of a model become embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingShape {
    /// How the hidden states of a text become one.
    pub pooling: Pooling,
    /// The number of values.
    pub dimensions: u32,
}

impl ModelCard {
    /// Returns the names of the model, the one that answers show first: each of its own, and then
    /// each with the way of decoding that is not the default, if the model has two. `default` is
    /// not among them.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        let own = || std::iter::once(&self.name).chain(&self.aliases).cloned();
        let two = self.diffusion.filter(|diffusion| !diffusion.is_only);
        let other = two.map(|diffusion| match diffusion.is_default {
            true => AUTOREGRESSIVE,
            false => DIFFUSION,
        });
        let others = other
            .into_iter()
            .flat_map(move |end| own().map(move |name| name + end));
        own().chain(others)
    }

    /// Returns whether `name` is one of the model's names.
    pub fn answers_to(&self, name: &str) -> bool {
        let (name, _) = self.decoding_of(name);
        name == self.name || name == "default" || self.aliases.iter().any(|alias| alias == name)
    }

    /// Splits a name into the model's own name and whether block diffusion is chosen.
    fn decoding_of<'n>(&self, name: &'n str) -> (&'n str, Option<bool>) {
        let is_own = |own: &String| own == name;
        let Some(diffusion) = self.diffusion else {
            return (name, None);
        };
        if is_own(&self.name) || self.aliases.iter().any(is_own) {
            return (name, None); // It may end so by itself.
        }
        let ends = [(DIFFUSION, true), (AUTOREGRESSIVE, false)];
        let count = if diffusion.is_only { 1 } else { 2 };
        let chosen = ends
            .iter()
            .take(count)
            .find_map(|(end, choice)| Some((name.strip_suffix(end)?, Some(*choice))));
        chosen.unwrap_or((name, None))
    }

    /// Returns how a request for the model `requested` is answered by block diffusion, if it is.
    pub(super) fn unmasking(&self, requested: Option<&str>) -> Option<Unmasking> {
        let diffusion = self.diffusion?;
        let chosen = requested.and_then(|name| self.decoding_of(name).1);
        let is_chosen = chosen.unwrap_or(diffusion.is_default);
        is_chosen.then_some(diffusion.unmasking)
    }

    /// Returns the context length of a request: in whole blocks, if its answer comes by block
    /// diffusion, because the last block is computed as a whole too.
    pub(super) fn context_of(&self, unmasking: Option<Unmasking>) -> u32 {
        let block = self.diffusion.filter(|_| unmasking.is_some());
        let block = block.map_or(1, |diffusion| diffusion.block);
        self.max_model_len / block * block
    }

    /// Checks that the model generates text.
    pub(super) fn check_generates(&self) -> Result<(), ApiError> {
        match self.embedding {
            None => Ok(()),
            Some(_) => Err(ApiError::no_text(&self.name)),
        }
    }

    /// Returns whether `tenant` may use the model.
    pub(super) fn is_allowed_for(&self, tenant: &Tenant) -> bool {
        tenant.may_use(|name| self.answers_to(name))
    }

    /// Checks the model name of a request. A request without a model name means this model.
    ///
    /// # Errors
    /// If `requested` is not a name of this model, or `tenant` may not use this model.
    pub(super) fn check(&self, requested: Option<&str>, tenant: &Tenant) -> Result<(), ApiError> {
        let allowed = self.is_allowed_for(tenant);
        match requested {
            Some(requested) if !self.answers_to(requested) => {
                let served = allowed.then_some(self.name.as_str());
                Err(ApiError::model_not_found(requested, served))
            }
            requested if !allowed => Err(ApiError::model_not_allowed(requested)),
            _ => Ok(()),
        }
    }
}

/// The model, its engine and everything else that answers requests.
pub struct Serving {
    /// The model.
    pub model: ModelCard,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The model's chat template. A model without a template serves completions only.
    pub chat_template: Option<ChatTemplate>,
    /// How the model is told about tools, and how it writes calls.
    pub tool_format: ToolFormat,
    /// The sampling parameters of requests that do not set them.
    pub defaults: SamplingDefaults,
    /// The engine that runs the model.
    pub engine: EngineHandle,
    /// Compiles the grammars that answers follow.
    pub grammars: Grammars,
    /// The metrics that the engine records.
    pub metrics: Metrics,
}

/// The state that all handlers share.
#[derive(Clone)]
pub struct App {
    inner: Arc<Inner>,
}

struct Inner {
    started: u64,
    tenants: ArcSwap<Tenants>,
    metrics_open: bool,
    access: OnceLock<Access>,
    traces: OnceLock<Arc<dyn TraceSink>>,
    serving: OnceLock<Arc<Serving>>,
    body_limits: BodyLimits,
    last_rates: LastRates,
    running: RunningRequests,
}

impl App {
    /// Returns the state of a server that is still loading its model and needs no API keys.
    pub fn loading() -> App {
        let connections = ConnectionLimits::default().connections;
        App::for_tenants(Tenants::anyone(Deadlines::default()), false, connections)
    }

    /// Returns the state of a server that is still loading its model and serves `tenants`.
    ///
    /// `connections` is the maximum number of open connections. With `metrics_open`, `/metrics`
    /// needs no API key.
    pub fn for_tenants(tenants: Tenants, metrics_open: bool, connections: usize) -> App {
        App {
            inner: Arc::new(Inner {
                started: unix_seconds(),
                tenants: ArcSwap::from_pointee(tenants),
                metrics_open,
                access: OnceLock::new(),
                traces: OnceLock::new(),
                serving: OnceLock::new(),
                body_limits: BodyLimits::new(connections),
                last_rates: LastRates::default(),
                running: RunningRequests::default(),
            }),
        }
    }

    /// Sets the hosts and origins that the server answers to. May be called once, before the first
    /// request. Without it, the server answers to all hosts and to no origin.
    pub fn set_access(&self, access: Access) {
        let first = self.inner.access.set(access).is_ok();
        assert!(first, "the access to a server is set once");
    }

    /// Returns the hosts and origins that the server answers to.
    pub(super) fn access(&self) -> &Access {
        self.inner.access.get_or_init(Access::default)
    }

    /// Records requests in `traces`. May be called once, before the first request.
    pub fn set_traces(&self, traces: Arc<dyn TraceSink>) {
        let first = self.inner.traces.set(traces).is_ok();
        assert!(first, "the traces of a server are set once");
    }

    /// Returns where requests are recorded, if they are.
    pub(super) fn traces(&self) -> Option<&dyn TraceSink> {
        self.inner.traces.get().map(Arc::as_ref)
    }

    /// Starts answering requests with `serving`. May be called once.
    pub fn serve(&self, serving: Serving) {
        let first = self.inner.serving.set(Arc::new(serving)).is_ok();
        assert!(first, "a server serves one model");
    }

    /// Replaces the tenants. Requests that the server has already accepted continue.
    pub fn set_tenants(&self, tenants: Tenants) {
        self.inner.tenants.store(Arc::new(tenants));
    }

    /// Returns the holder of the API key `key`.
    pub(super) fn key_holder(&self, key: Option<&[u8]>) -> Option<KeyHolder> {
        self.inner.tenants.load().holder(key)
    }

    /// Returns whether the operator has a key.
    pub(super) fn has_admin_key(&self) -> bool {
        self.inner.tenants.load().has_admin()
    }

    /// Returns the requests that run or wait.
    pub(super) fn running(&self) -> &RunningRequests {
        &self.inner.running
    }

    /// Returns whether `/metrics` needs no API key.
    pub(super) fn metrics_open(&self) -> bool {
        self.inner.metrics_open
    }

    /// Returns when the server started, in Unix seconds.
    pub(super) fn started(&self) -> u64 {
        self.inner.started
    }

    /// Returns the server's limits for request bodies.
    pub(super) fn body_limits(&self) -> &BodyLimits {
        &self.inner.body_limits
    }

    /// Returns the last known rate limits of all tenants.
    pub(super) fn last_rates(&self) -> &LastRates {
        &self.inner.last_rates
    }

    /// Returns the model and its engine.
    ///
    /// # Errors
    /// If the server is still loading its model.
    pub(super) fn serving(&self) -> Result<&Arc<Serving>, ApiError> {
        self.inner.serving.get().ok_or_else(ApiError::loading)
    }
}
