//! The thread of a grammar: it has a worker compile the grammar, and then compute the masks of all
//! answers that follow the grammar.
//!
//! The engine tells the thread of each drawn token. The worker computes the next masks while the
//! model computes the next logits.
//!
//! Invariant: a parser consumes only tokens that were drawn or that its grammar forces.
//!
//! Invariant: what goes wrong with a worker ends the answers of its grammar only.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use llguidance::api::TopLevelGrammar;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::TokenId;
use super::constrained_output::{CompiledGrammar, Grammar, MaskMessage, NO_THREAD, NewAnswer};
use super::error::GrammarError;
use super::frames::{self, JobDone, WorkerJob};
use super::masks::TokenMasks;
use super::turns::{PAUSE, SLICE, WorkKind, WorkerTurns};
use super::window::{LastMask, MAX_FORCED, Window};
use super::workers::{BROKEN, Death, GrammarProcesses, WorkerProcess};

/// The longest job, without the pauses. The limit of processor time comes first, unless the machine
/// is very busy or the worker waits for something.
const MAX_JOB_TIME: Duration = Duration::from_secs(10);

/// What an answer hears whose worker something else has ended.
const ENDED: &str = "the process that computes its masks was ended";

/// Where the grammars of one model are compiled, and who has turns there.
pub(super) struct GrammarSite {
    pub(super) workers: Arc<GrammarProcesses>,
    pub(super) turns: Arc<WorkerTurns>,
    pub(super) vocabulary: usize,
}

/// What a compilation asks and tells the requests that wait for it.
pub(super) struct CompilationWatch<'a> {
    /// Whether somebody still waits.
    pub(super) is_wanted: &'a dyn Fn() -> bool,
    /// Set while the compilation runs, unless it has to make pauses.
    pub(super) runs: &'a AtomicBool,
}

/// The thread's part of a grammar.
pub(super) struct GrammarThread {
    worker: Option<WorkerProcess>, // `None` after its end.
    workers: Arc<GrammarProcesses>,
    turns: Arc<WorkerTurns>,
    tenant: u32,
    vocabulary: usize,
    first: Vec<TokenId>, // The tokens that the grammar forces before all others.
    answers: HashMap<u64, Answer>,
    messages: mpsc::Receiver<MaskMessage>,
    excess: Arc<OnceLock<String>>,
}

/// Why a job has no result.
enum JobError {
    /// Nobody waits for the result any more.
    Unwanted,
    /// The grammar has exceeded this limit.
    Excess(String),
    /// Something else has ended the worker.
    Ended,
}

/// The thread's part of an answer.
struct Answer {
    ahead: VecDeque<TokenId>, // Forced tokens that are not drawn yet.
    tokens: u32,              // The drawn tokens.
    has_parser: bool,         // In the worker.
    stop_tokens: Vec<TokenId>,
    masks: Arc<TokenMasks>,
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.masks.abandon(NO_THREAD); // Nobody reads them any more, unless the thread panics.
    }
}

impl GrammarThread {
    /// Waits for a turn of `tenant` and compiles a grammar. Gives up when nobody wants the grammar
    /// any more. Returns the grammar and the thread's part of it.
    ///
    /// # Errors
    /// If no answer can follow the grammar, it exceeds a limit, or the system starts no process.
    pub(super) fn compile(
        site: &GrammarSite,
        tenant: u32,
        source: TopLevelGrammar,
        watch: &CompilationWatch<'_>,
    ) -> Result<(Grammar, GrammarThread), GrammarError> {
        site.turns.begin(tenant, WorkKind::Compilation);
        if !(watch.is_wanted)() {
            return Err(GrammarError::Busy);
        }
        watch.runs.store(true, Ordering::Relaxed);
        let no_process = |error: io::Error| GrammarError::NoProcess(error.to_string());
        let worker = site.workers.fork().map_err(no_process)?;
        let connection = worker.connection.try_clone().map_err(no_process)?;
        let (sender, messages) = mpsc::channel();
        let mut thread = GrammarThread {
            worker: Some(worker),
            workers: Arc::clone(&site.workers),
            turns: Arc::clone(&site.turns),
            tenant,
            vocabulary: site.vocabulary,
            first: Vec::new(),
            answers: HashMap::new(),
            messages,
            excess: Arc::default(),
        };
        let job = WorkerJob::Compile(source);
        let done = thread.work(&job, WorkKind::Compilation, Some(watch));
        let (first, memory) = done.map_err(|error| match error {
            JobError::Excess(limit) => GrammarError::TooCostly(limit),
            JobError::Ended => GrammarError::NoProcess(ENDED.to_owned()),
            JobError::Unwanted => GrammarError::TooSlow,
        })?;
        if let LastMask::DeadEnd(why) = first.last {
            return Err(GrammarError::Invalid(why));
        }
        thread.first.clone_from(&first.forced);
        let grammar = Grammar::new(CompiledGrammar {
            thread: sender,
            first,
            vocabulary: site.vocabulary,
            answers: AtomicU64::new(0),
            connection,
            excess: Arc::clone(&thread.excess),
            memory,
        });
        Ok((grammar, thread))
    }

    /// Computes masks until the grammar and all its answers are dropped.
    pub(super) fn run(mut self) {
        while let Ok(message) = self.messages.recv() {
            match message {
                MaskMessage::Begin(id, answer) => self.begin(id, answer),
                MaskMessage::Drawn(id, token) => self.drawn(id, token),
                MaskMessage::End(id) => self.end(id),
            }
        }
    }

    fn begin(&mut self, id: u64, new: NewAnswer) {
        let answer = Answer {
            ahead: self.first.iter().copied().collect(),
            tokens: 0,
            has_parser: false,
            stop_tokens: new.stop_tokens,
            masks: new.masks,
        };
        match self.worker {
            Some(_) => drop(self.answers.insert(id, answer)),
            None => answer.masks.abandon(self.why_ended()),
        }
    }

    fn drawn(&mut self, id: u64, token: TokenId) {
        let Some(answer) = self.answers.get_mut(&id) else {
            return; // It has ended.
        };
        answer.tokens += 1;
        if let Some(forced) = answer.ahead.pop_front() {
            if token != forced {
                let answer = self.answers.remove(&id).expect("it was just there");
                answer
                    .masks
                    .abandon("another token than the forced one was drawn");
            }
            return;
        }
        answer.has_parser = true;
        let job = WorkerJob::Next { answer: id, token };
        self.turns.begin(self.tenant, WorkKind::Mask);
        let Ok((window, _)) = self.work(&job, WorkKind::Mask, None) else {
            let why = self.why_ended().to_owned();
            for (_, answer) in self.answers.drain() {
                answer.masks.abandon(&why);
            }
            return;
        };
        let answer = self.answers.get_mut(&id).expect("only this thread ends it");
        answer.ahead.extend(&window.forced);
        (answer.masks).publish(answer.tokens, &window, &answer.stop_tokens);
    }

    fn end(&mut self, id: u64) {
        let has_parser = self.answers.remove(&id).is_some_and(|own| own.has_parser);
        if let Some(worker) = self.worker.as_ref().filter(|_| has_parser) {
            // The next job finds out that a worker has ended.
            let _ = frames::send(&worker.connection, &WorkerJob::End { answer: id }, &[]);
        }
    }

    fn why_ended(&self) -> &str {
        self.excess.get().map_or(ENDED, String::as_str)
    }

    /// Has the worker do a job in a turn that has begun, and ends the turn. Returns the masks and
    /// the worker's memory.
    fn work(
        &mut self,
        job: &WorkerJob,
        work: WorkKind,
        watch: Option<&CompilationWatch<'_>>,
    ) -> Result<(Window, u64), JobError> {
        let mut ran = Duration::ZERO;
        let result = self.exchange(job, work, watch, &mut ran);
        let micros = result.as_ref().map(|(_, done)| done.micros);
        // A worker that has ended does not say its processor time, which is about what it ran.
        let time = micros.map_or(ran, Duration::from_micros);
        self.turns.end(self.tenant, work, time);
        let error = match result {
            Ok((window, done)) => return Ok((window, done.memory)),
            Err(error) => error,
        };
        if let JobError::Excess(limit) = &error {
            self.excess.get_or_init(|| limit.clone());
        }
        if !matches!(error, JobError::Unwanted) {
            self.workers.deaths.fetch_add(1, Ordering::Relaxed);
        }
        self.worker = None;
        Err(error)
    }

    /// Adds the time between the pauses to `ran`.
    fn exchange(
        &mut self,
        job: &WorkerJob,
        work: WorkKind,
        watch: Option<&CompilationWatch<'_>>,
        ran: &mut Duration,
    ) -> Result<(Window, JobDone), JobError> {
        let worker = self.worker.as_ref().ok_or(JobError::Ended)?;
        let sent = frames::send(&worker.connection, job, &[]);
        while sent.is_ok() && !has_reply(worker, SLICE) {
            *ran += SLICE;
            if watch.is_some_and(|watch| !(watch.is_wanted)()) {
                return Err(JobError::Unwanted);
            }
            if *ran > MAX_JOB_TIME {
                let limit = MAX_JOB_TIME.as_secs();
                return Err(JobError::Excess(format!(
                    "it took more than {limit} seconds"
                )));
            }
            if self.turns.must_pause(self.tenant, work, *ran) {
                if let Some(watch) = watch {
                    watch.runs.store(false, Ordering::Relaxed);
                }
                worker.pause();
                thread::sleep(PAUSE);
                worker.resume();
            }
        }
        let received = sent.and_then(|()| frames::receive::<JobDone>(&worker.connection));
        let checked = received.and_then(|(done, bits)| self.window(done, &bits));
        checked.map_err(|error| self.death(&error))
    }

    /// Finds out why the worker has failed.
    fn death(&mut self, error: &io::Error) -> JobError {
        if error.kind() == io::ErrorKind::InvalidData {
            tracing::error!("the reply of a grammar process is wrong: {error}");
            return JobError::Excess(BROKEN.to_owned());
        }
        match self.worker.take().map(WorkerProcess::death) {
            Some(Death::OfGrammar(limit)) => JobError::Excess(limit),
            Some(Death::FromOutside) | None => {
                tracing::warn!("a grammar process was ended: {error}");
                JobError::Ended
            }
        }
    }

    /// Returns the masks of a reply. A library that has broken its worker may have broken the reply
    /// too.
    ///
    /// # Errors
    /// If the reply names tokens that the model does not have, or does not name all.
    fn window(&self, mut done: JobDone, bits: &[u8]) -> io::Result<(Window, JobDone)> {
        let forced = std::mem::take(&mut done.masks.forced);
        let is_known = |token: &TokenId| (*token as usize) < self.vocabulary;
        let words = bits.chunks_exact(size_of::<u32>());
        let last = match &done.masks.last {
            Err(why) => LastMask::DeadEnd(why.clone()),
            Ok(_) if words.len() < self.vocabulary.div_ceil(u32::BITS as usize) => {
                return Err(wrong("a mask is too short"));
            }
            Ok(may_end) => LastMask::Allowed {
                bits: words
                    .map(|word| u32::from_ne_bytes(word.try_into().expect("a word has 4 bytes")))
                    .collect(),
                may_end: *may_end,
            },
        };
        if forced.len() > MAX_FORCED || !forced.iter().all(is_known) {
            return Err(wrong("a forced token is not in the vocabulary"));
        }
        Ok((Window { forced, last }, done))
    }
}

fn wrong(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Waits for a reply of a worker, or for its end.
fn has_reply(worker: &WorkerProcess, time: Duration) -> bool {
    let mut files = [PollFd::new(&worker.connection, PollFlags::IN)];
    let time = Timespec {
        tv_sec: 0,
        tv_nsec: time.subsec_nanos().into(),
    };
    // An interrupted wait is only shorter.
    poll(&mut files, Some(&time)).is_ok_and(|ready| ready > 0)
}
