//! Compiles grammars on threads of their own, and keeps them for each tenant.
//!
//! Compiling takes work in proportion to what a client writes, so it has budgets. The budgets of
//! `llguidance` count work, so a grammar is refused on every machine or on none. A limit on the
//! time is behind them. Tenants take turns.

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::TokenId;
use super::cache::GrammarCache;
use super::compiled::CompiledGrammar;
use super::fair_queue::FairQueue;
use super::grammar::Grammar;
use super::mask_thread::MaskThreads;
use super::source::GrammarSource;
use super::vocabulary;
use super::window::plain_error;
use crate::text::Tokenizer;

/// How long a request waits for its grammar.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// The most grammars that wait to be compiled.
const MAX_WAITING: usize = 256;

/// The stack of a thread that compiles. The parsers of grammars recurse.
const STACK_BYTES: usize = 16 << 20;

/// Compiles grammars for one model. Clones share the threads and the compiled grammars.
#[derive(Clone)]
pub struct Grammars {
    service: Arc<Service>,
}

/// Why a request gets no grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrammarError {
    /// The grammar cannot be compiled, for this reason.
    Invalid(String),
    /// The grammar takes too long to compile.
    TooSlow,
    /// Too many other grammars wait to be compiled.
    Busy,
}

impl fmt::Display for GrammarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GrammarError::Invalid(why) => write!(f, "cannot be compiled: {why}"),
            GrammarError::TooSlow => {
                let seconds = MAX_WAIT.as_secs();
                write!(
                    f,
                    "takes more than {seconds} seconds to compile; simplify it"
                )
            }
            GrammarError::Busy => f.write_str("waits behind too many others; try again later"),
        }
    }
}

/// Ends the compiling threads when the last handle is dropped.
struct Service {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
}

struct State {
    cache: GrammarCache,
    waiting: FairQueue<GrammarJob>,
    has_ended: bool,
}

struct GrammarJob {
    tenant: u32,
    source: GrammarSource,
    has_begun: Arc<AtomicBool>,
    done: oneshot::Sender<Result<Grammar, String>>,
}

impl Grammars {
    /// Starts the threads that compile grammars and compute masks, `threads` of each. `end_tokens`
    /// end an answer of the model.
    ///
    /// # Errors
    /// If the system does not start a thread.
    pub fn start(
        tokenizer: Arc<Tokenizer>,
        end_tokens: &[TokenId],
        threads: usize,
    ) -> io::Result<Grammars> {
        let masks = Arc::new(MaskThreads::start(threads)?);
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                cache: GrammarCache::new(),
                waiting: FairQueue::new(MAX_WAITING),
                has_ended: false,
            }),
            work: Condvar::new(),
        });
        let service = Arc::new(Service {
            shared: Arc::clone(&shared),
        });
        let end_tokens = end_tokens.to_vec();
        // The first thread prepares the vocabulary, and the others wait for it.
        let compiler = LazyLock::new(move || Compiler::new(tokenizer, &end_tokens, masks));
        let compiler = Arc::new(compiler);
        for index in 0..threads {
            let (shared, compiler) = (Arc::clone(&shared), Arc::clone(&compiler));
            let thread = thread::Builder::new().name(format!("sterna-grammar-{index}"));
            let run = move || shared.run(&compiler);
            thread.stack_size(STACK_BYTES).spawn(run)?;
        }
        Ok(Grammars { service })
    }

    /// Returns the compiled grammar of `source`. It is compiled unless `tenant` has done so lately.
    ///
    /// # Errors
    /// If it cannot be compiled, or not soon enough.
    pub async fn compile(
        &self,
        tenant: u32,
        source: GrammarSource,
    ) -> Result<Grammar, GrammarError> {
        let has_begun = Arc::new(AtomicBool::new(false));
        let (done, compiled) = oneshot::channel();
        {
            let mut state = self.service.shared.state();
            if let Some(grammar) = state.cache.get(tenant, &source) {
                return Ok(grammar);
            }
            let job = GrammarJob {
                tenant,
                source,
                has_begun: Arc::clone(&has_begun),
                done,
            };
            // The request of a job that loses its place finds its channel closed.
            let entered = state.waiting.push(tenant, job);
            entered.map_err(|_| GrammarError::Busy)?;
        }
        self.service.shared.work.notify_one();
        match timeout(MAX_WAIT, compiled).await {
            Ok(Ok(compiled)) => compiled.map_err(GrammarError::Invalid),
            Ok(Err(_)) => Err(GrammarError::Busy),
            Err(_) if has_begun.load(Ordering::Relaxed) => Err(GrammarError::TooSlow),
            Err(_) => Err(GrammarError::Busy),
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.shared.state().has_ended = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    /// No method panics halfway through a change, so the state is right even if the lock is
    /// poisoned.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, compiler: &Compiler) {
        while let Some(job) = self.next_job() {
            if job.done.is_closed() {
                continue; // The client has left.
            }
            job.has_begun.store(true, Ordering::Relaxed);
            // A panic must not end the thread, which serves all tenants.
            let compiled = catch_unwind(AssertUnwindSafe(|| compiler.compile(&job.source)));
            let compiled = compiled.unwrap_or_else(|_| Err("the compiler failed".to_owned()));
            if let Ok(grammar) = &compiled {
                let mut state = self.state();
                (state.cache).insert(job.tenant, job.source, grammar.clone());
            }
            // The client may have left.
            let _ = job.done.send(compiled);
        }
    }

    fn next_job(&self) -> Option<GrammarJob> {
        let mut state = self.state();
        loop {
            if state.has_ended {
                return None;
            }
            if let Some(job) = state.waiting.pop() {
                return Some(job);
            }
            let woken = self.work.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What turns a source into a grammar of one model.
struct Compiler {
    factory: ParserFactory,
    masks: Arc<MaskThreads>,
}

impl Compiler {
    fn new(tokenizer: Arc<Tokenizer>, end_tokens: &[TokenId], masks: Arc<MaskThreads>) -> Compiler {
        let environment = vocabulary::environment(tokenizer, end_tokens);
        let slices = SlicedBiasComputer::json_slices();
        let none = InferenceCapabilities::default();
        let mut factory = ParserFactory::new(&environment, none, &slices)
            .expect("the slices are valid expressions");
        factory.quiet();
        *factory.limits_mut() = limits();
        Compiler { factory, masks }
    }

    fn compile(&self, source: &GrammarSource) -> Result<Grammar, String> {
        let parser = self.factory.create_parser(source.top_level());
        let matcher = Matcher::new(Ok(parser.map_err(plain_error)?));
        let vocabulary = self.factory.tok_env().tok_trie().vocab_size();
        let compiled = CompiledGrammar::new(matcher, vocabulary)?;
        Ok(Grammar::new(compiled, Arc::clone(&self.masks)))
    }
}

/// Returns the budgets of a grammar and of its masks.
fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 500_000, // About 10 ms.
        max_grammar_size: 100_000,   // Symbols in all rules.
        step_lexer_fuel: 100_000,    // About 7 ms for a mask.
        step_max_items: 50_000,      // About 3 ms for a mask.
        max_lexer_states: 16_000,    // At 1 to 2 KB, in each answer.
        max_items_in_row: 2_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}
