//! Compiles grammars in processes of their own, and keeps them for each tenant.
//!
//! Compiling takes work in proportion to what a client writes, so it has budgets. The budgets of
//! `llguidance` count work, so a grammar is refused on every machine or on none. Limits of the
//! system on a worker are behind them. Tenants take turns.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::TokenId;
use super::cache::{Compiled, GrammarCache};
use super::constrained_output::Grammar;
use super::error::{GrammarError, MAX_COMPILE};
use super::fair_queue::FairQueue;
use super::grammar_thread::{CompilationWatch, GrammarSite, GrammarThread};
use super::source::GrammarSource;
use super::turns::WorkerTurns;
use super::workers::{BROKEN, GrammarProcesses};
use crate::text::Tokenizer;

/// How long a request waits until the compilation of its grammar begins.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// The most grammars that wait to be compiled.
const MAX_WAITING: usize = 256;

/// Compiles grammars for one model. Clones share the processes and the compiled grammars.
#[derive(Clone)]
pub struct Grammars {
    service: Result<Arc<Service>, String>,
}

/// How grammars are compiled and followed.
pub struct GrammarOptions<'a> {
    /// This program. Its command [`COMMAND`](super::COMMAND) must run
    /// [`run_template`](super::run_template).
    pub program: &'a Path,
    /// They end an answer of the model.
    pub end_tokens: &'a [TokenId],
    /// How many masks of a tenant are computed at a time.
    pub masks_at_once: usize,
    /// How many grammars are compiled at a time, each of another tenant.
    pub compilations_at_once: usize,
}

/// What grammars have taken and take.
#[derive(Default)]
pub struct GrammarUsage {
    /// The processes that run: one for each grammar that is compiled, cached or followed.
    pub workers: u64,
    /// The workers that have ended before their grammars.
    pub deaths: u64,
    /// The grammars that wait to be compiled.
    pub waiting: u64,
    /// The memory of the cached grammars, in bytes.
    pub cache_bytes: u64,
    /// The processor time of each tenant: for compilations and for masks.
    pub times: Vec<(u32, [Duration; 2])>,
}

/// What the requests, and the threads of grammars, share.
struct Service {
    site: GrammarSite,
    at_once: usize,
    state: Mutex<State>,
}

struct State {
    cache: GrammarCache,
    waiting: FairQueue<GrammarJob>,
    in_flight: Vec<InFlight>, // A tenant's equal grammars are compiled once.
    compiling: Vec<u32>,      // The tenants whose grammars are compiled now.
}

struct GrammarJob {
    tenant: u32,
    source: GrammarSource,
    runs: Arc<AtomicBool>,                 // As in `CompilationWatch`.
    done: watch::Sender<Option<Compiled>>, // `None` comes before the compilation's end.
}

/// A grammar that waits or is being compiled. Clones are for the requests that want it.
#[derive(Clone)]
struct InFlight {
    tenant: u32,
    source: GrammarSource,
    runs: Arc<AtomicBool>,
    compiled: watch::Receiver<Option<Compiled>>,
}

impl Grammars {
    /// Starts the process from which the workers of grammars are forked. `is_busy` says whether the
    /// engine computes answers. `charge` hears of the processor time of each tenant's grammars,
    /// less than a millisecond of it late. If the system does not start the process, the log says
    /// so, and every grammar is refused.
    pub fn start(
        tokenizer: Arc<Tokenizer>,
        options: &GrammarOptions<'_>,
        is_busy: impl Fn() -> bool + Send + Sync + 'static,
        charge: impl Fn(u32, Duration) + Send + Sync + 'static,
    ) -> Grammars {
        let vocabulary = tokenizer.vocabulary() as usize;
        let program = options.program.to_owned();
        let workers = GrammarProcesses::start(program, tokenizer, options.end_tokens);
        let service = workers.map(|workers| {
            Arc::new(Service {
                site: GrammarSite {
                    workers: Arc::new(workers),
                    turns: Arc::new(WorkerTurns::new(options.masks_at_once, is_busy, charge)),
                    vocabulary,
                },
                at_once: options.compilations_at_once,
                state: Mutex::new(State {
                    cache: GrammarCache::new(),
                    waiting: FairQueue::new(MAX_WAITING),
                    in_flight: Vec::new(),
                    compiling: Vec::new(),
                }),
            })
        });
        let service = service.map_err(|error| error.to_string());
        if let Err(why) = &service {
            tracing::error!("no process for grammars starts, so structured output is off: {why}");
        }
        Grammars { service }
    }

    /// Returns the compiled grammar of `source`. It is compiled unless `tenant` has done so lately.
    ///
    /// # Errors
    /// If it cannot be compiled, or not soon enough, or has exceeded a limit before.
    pub async fn compile(
        &self,
        tenant: u32,
        source: GrammarSource,
    ) -> Result<Grammar, GrammarError> {
        let service = self.service.as_ref();
        let service = service.map_err(|why| GrammarError::NoProcess(why.clone()))?;
        let mut job = {
            let mut state = service.state();
            if let Some(compiled) = state.cache.get(tenant, &source) {
                return compiled;
            }
            state.enter(tenant, source)?
        };
        service.begin_jobs();
        match job.within(MAX_WAIT).await {
            Some(compiled) => compiled,
            None if !job.runs.load(Ordering::Relaxed) => Err(GrammarError::Busy),
            // It may have begun just now. Only what takes too long itself is refused for good.
            None => match job.within(MAX_COMPILE).await {
                Some(compiled) => compiled,
                None if job.runs.load(Ordering::Relaxed) => Err(GrammarError::TooSlow),
                None => Err(GrammarError::Busy),
            },
        }
    }

    /// Returns what grammars have taken and take.
    pub fn usage(&self) -> GrammarUsage {
        let Ok(service) = &self.service else {
            return GrammarUsage::default();
        };
        let state = service.state();
        GrammarUsage {
            workers: service.site.workers.running.load(Ordering::Relaxed),
            deaths: service.site.workers.deaths.load(Ordering::Relaxed),
            waiting: state.waiting.len() as u64,
            cache_bytes: state.cache.bytes(),
            times: service.site.turns.used(),
        }
    }
}

impl InFlight {
    /// Waits for the compilation. `None` means that the time is over.
    async fn within(&mut self, time: Duration) -> Option<Compiled> {
        let compiled = timeout(time, self.compiled.wait_for(Option::is_some)).await;
        match compiled.ok()? {
            Ok(compiled) => compiled.clone(),
            Err(_) => Some(Err(GrammarError::Busy)), // It has lost its place.
        }
    }
}

impl Service {
    /// No method panics halfway through a change, so the state is right even if the lock is
    /// poisoned.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the jobs whose turn it is, each in a thread of its own.
    fn begin_jobs(self: &Arc<Self>) {
        while let Some(job) = self.state().next_job(self.at_once) {
            let tenant = job.tenant;
            let service = Arc::clone(self);
            let thread = thread::Builder::new().name("sterna-grammar".to_owned());
            let started = thread.spawn(move || service.run(job));
            if let Err(error) = started {
                // The requests find the channel of the job closed.
                tracing::error!("no thread for a grammar starts: {error}");
                self.state().leave(tenant);
            }
        }
    }

    /// Compiles a grammar, and then computes its masks.
    fn run(self: Arc<Self>, job: GrammarJob) {
        let watch = CompilationWatch {
            // Only the list of jobs has a receiver after all requests have left.
            is_wanted: &|| job.done.receiver_count() > 1,
            runs: &job.runs,
        };
        let compile = || {
            let source = job.source.top_level();
            GrammarThread::compile(&self.site, job.tenant, source, &watch)
        };
        // A panic must not keep the tenant's turn.
        let (compiled, thread) = match catch_unwind(AssertUnwindSafe(compile)) {
            Ok(Ok((grammar, thread))) => (Ok(grammar), Some(thread)),
            Ok(Err(error)) => (Err(error), None),
            Err(_) => (Err(GrammarError::Invalid(BROKEN.to_owned())), None),
        };
        {
            let mut state = self.state();
            state.leave(job.tenant);
            let is_it = |other: &InFlight| Arc::ptr_eq(&other.runs, &job.runs);
            state.in_flight.retain(|other| !is_it(other));
            if matches!(compiled, Ok(_) | Err(GrammarError::TooCostly(_))) {
                (state.cache).insert(job.tenant, job.source, compiled.clone());
            }
        }
        // The clients may have left.
        let _ = job.done.send(Some(compiled));
        self.begin_jobs();
        // Both have the grammar, and its thread ends when nobody has it any more.
        drop((job.done, self));
        if let Some(thread) = thread {
            thread.run();
        }
    }
}

impl State {
    /// Returns the next job, if there is one and fewer than `at_once` grammars are being compiled.
    fn next_job(&mut self, at_once: usize) -> Option<GrammarJob> {
        while self.compiling.len() < at_once {
            let compiling = &self.compiling;
            let job = self.waiting.pop(|tenant| !compiling.contains(&tenant))?;
            if job.done.receiver_count() > 1 {
                self.compiling.push(job.tenant);
                return Some(job);
            }
            // All its clients have left, and it loses its place among the jobs too.
        }
        None
    }

    /// Notes that no grammar of `tenant` is being compiled any more.
    fn leave(&mut self, tenant: u32) {
        self.compiling.retain(|compiling| *compiling != tenant);
    }

    /// Returns the job of an equal grammar of the same tenant, or adds one.
    fn enter(&mut self, tenant: u32, source: GrammarSource) -> Result<InFlight, GrammarError> {
        // A job that lost its place has dropped its sender.
        (self.in_flight).retain(|job| job.compiled.has_changed().is_ok());
        let is_it = |job: &&InFlight| job.tenant == tenant && job.source == source;
        if let Some(job) = self.in_flight.iter().find(is_it) {
            return Ok(job.clone());
        }
        let runs = Arc::new(AtomicBool::new(false));
        let (done, compiled) = watch::channel(None);
        let job = GrammarJob {
            tenant,
            source: source.clone(),
            runs: Arc::clone(&runs),
            done,
        };
        // The requests of a job that loses its place find its channel closed.
        let entered = self.waiting.push(tenant, job);
        entered.map_err(|_| GrammarError::Busy)?;
        let job = InFlight {
            tenant,
            source,
            runs,
            compiled,
        };
        self.in_flight.push(job.clone());
        Ok(job)
    }
}
