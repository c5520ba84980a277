//! A worker: a process that compiles one grammar and computes the masks of its answers.
//!
//! Invariant: a worker does one job at a time, so a worker that dies names the grammar that killed
//! it.

use std::collections::HashMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::TokenId;
use super::frames::{self, JobDone, Masks, WorkerJob};
use super::time_limit::{TimeLimit, processor_time};
use super::vocabulary;
use super::window::{LastMask, Window, plain_error};
use crate::text::Tokenizer;

/// The memory of a worker beyond what it shares with all others, in bytes.
pub(super) const MAX_MEMORY: u64 = 256 << 20;

/// The longest job in seconds of processor time.
pub(super) const MAX_JOB_SECONDS: u64 = 3;

/// The stack of the thread that works. The parsers of grammars recurse.
pub(super) const STACK_BYTES: usize = 16 << 20;

/// Prepares a vocabulary for grammars.
pub(super) fn factory(tokenizer: Tokenizer, end_tokens: &[TokenId]) -> ParserFactory {
    let environment = vocabulary::environment(tokenizer, end_tokens);
    let slices = SlicedBiasComputer::json_slices();
    let none = InferenceCapabilities::default();
    let factory = ParserFactory::new(&environment, none, &slices);
    let mut factory = factory.expect("the slices are valid expressions");
    factory.quiet();
    *factory.limits_mut() = limits();
    factory
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

/// Does the jobs that come from the server until the server closes the connection. The calling
/// thread watches the time meanwhile.
pub(super) fn run(server: UnixStream, factory: ParserFactory) -> io::Result<()> {
    limit_memory()?;
    let (limit, watch) = TimeLimit::new();
    let (ended, end) = mpsc::channel();
    let worker = thread::Builder::new().stack_size(STACK_BYTES);
    worker.spawn(move || {
        let mut worker = Worker {
            factory,
            limit,
            grammar: None,
            answers: HashMap::new(),
            #[cfg(feature = "faults")]
            fault: None,
        };
        drop(ended.send(worker.serve(&server)));
    })?;
    watch.run();
    end.recv().map_err(io::Error::other)?
}

struct Worker {
    factory: ParserFactory,
    limit: TimeLimit,
    grammar: Option<Matcher>, // After the forced tokens of the first window.
    answers: HashMap<u64, Matcher>,
    #[cfg(feature = "faults")]
    fault: Option<super::worker_fault::WorkerFault>,
}

impl Worker {
    fn serve(&mut self, server: &UnixStream) -> io::Result<()> {
        loop {
            let job = match frames::receive(server) {
                Ok((job, _)) => job,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(error) => return Err(error),
            };
            let is_compilation = matches!(job, WorkerJob::Compile(_));
            let began = processor_time();
            limit_time(began)?;
            // A panic of the library ends the answer that the job is for.
            let masks = catch_unwind(AssertUnwindSafe(|| self.work(job)));
            let masks = masks.unwrap_or_else(|_| Some(Window::dead_end("the library failed")));
            let Some(window) = masks else {
                continue;
            };
            let (last, bits) = match window.last {
                LastMask::Allowed { bits, may_end } => (Ok(may_end), bits),
                LastMask::DeadEnd(why) => (Err(why), Box::default()),
            };
            let done = JobDone {
                masks: Masks {
                    forced: window.forced,
                    last,
                },
                micros: (processor_time() - began).as_micros() as u64,
                memory: if is_compilation { own_memory() } else { 0 },
            };
            let bits: Vec<u8> = bits.iter().flat_map(|word| word.to_ne_bytes()).collect();
            frames::send(server, &done, &bits)?;
        }
    }

    fn work(&mut self, job: WorkerJob) -> Option<Window> {
        match job {
            WorkerJob::Compile(grammar) => {
                #[cfg(feature = "faults")]
                {
                    self.fault = super::worker_fault::WorkerFault::of(&grammar);
                }
                let compiled = self.compile(grammar);
                Some(compiled.unwrap_or_else(|why| Window::dead_end(&why)))
            }
            WorkerJob::Next { answer, token } => {
                #[cfg(feature = "faults")]
                if let Some(fault) = self.fault {
                    return Some(fault.happen());
                }
                let grammar = &self.grammar;
                let parser = self.answers.entry(answer).or_insert_with(|| {
                    let grammar = grammar.as_ref().expect("the grammar is compiled first");
                    grammar.deep_clone() // With caches of its own.
                });
                Some(Window::after(token, parser, &self.limit))
            }
            WorkerJob::End { answer } => {
                self.answers.remove(&answer);
                None
            }
        }
    }

    fn compile(&mut self, grammar: TopLevelGrammar) -> Result<Window, String> {
        let parser = self.factory.create_parser(grammar);
        let mut parser = Matcher::new(Ok(parser.map_err(plain_error)?)).into_cancellable();
        let first = Window::next(&mut parser, &self.limit);
        self.grammar = Some(parser);
        Ok(first)
    }
}

/// Lets the system end this process if it takes much longer than a job may.
fn limit_time(used: Duration) -> io::Result<()> {
    let seconds = used.as_secs() + 1 + MAX_JOB_SECONDS;
    set_limit(Resource::Cpu, seconds)
}

/// Lets the system refuse memory beyond the limit. Only Linux knows the memory of a process that
/// counts.
fn limit_memory() -> io::Result<()> {
    set_limit(Resource::Core, 0)?; // A worker that dies leaves no file behind.
    #[cfg(target_os = "linux")]
    {
        // A system without memory should end a worker, not the server. It works without this.
        let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
        let own = procfs::process::Process::myself().and_then(|own| own.statm());
        let data = own.map_err(io::Error::other)?.data * procfs::page_size();
        set_limit(Resource::Data, data + MAX_MEMORY)?;
    }
    Ok(())
}

fn set_limit(resource: Resource, limit: u64) -> io::Result<()> {
    let maximum = getrlimit(resource).maximum;
    let current = Some(limit.min(maximum.unwrap_or(u64::MAX)));
    Ok(setrlimit(resource, Rlimit { current, maximum })?)
}

/// Returns the memory of this process that no other process shares, in bytes. It is 0 on a system
/// that does not tell.
fn own_memory() -> u64 {
    #[cfg(target_os = "linux")]
    if let Ok(memory) = procfs::process::Process::myself().and_then(|own| own.smaps_rollup()) {
        let all = memory.memory_map_rollup.0.iter();
        let own = all.flat_map(|map| ["Private_Clean", "Private_Dirty"].map(|key| (map, key)));
        return own
            .filter_map(|(map, key)| map.extension.map.get(key))
            .sum();
    }
    0
}
