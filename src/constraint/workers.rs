//! The server's side of the grammar processes: it starts the template, and gets workers from it.

use std::io::{self, IoSlice, PipeReader, Read, Write, pipe};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::Signal;

use super::TokenId;
use super::frames::{self, BorrowedVocabulary};
use super::template::{END, FORK, PAUSE, RESUME, WorkerOrder};
use super::worker::{MAX_JOB_SECONDS, MAX_MEMORY, STACK_BYTES};
use crate::text::Tokenizer;

/// The command of the program that runs the template.
pub const COMMAND: &str = "grammar-template";

/// What a grammar has done that has broken its worker.
pub(super) const BROKEN: &str = "it made the library fail";

/// How long the template may take for an order. It prepares the vocabulary before the first one.
const ORDER_TIME: Duration = Duration::from_secs(60);

/// How long the rest of a message to or from a worker may take.
const REPLY_TIME: Duration = Duration::from_secs(10);

/// The largest part of what a worker has written before its end that is read.
const MAX_LAST_WORDS: u64 = 4096;

/// Starts workers. The template is started again if it has ended.
pub(super) struct GrammarProcesses {
    program: PathBuf,
    tokenizer: Arc<Tokenizer>,
    end_tokens: Vec<TokenId>,
    template: Mutex<Template>,
    /// The workers that run.
    pub(super) running: AtomicU64,
    /// The workers that have ended before their grammars.
    pub(super) deaths: AtomicU64,
}

/// The template process.
struct Template {
    process: Child,
    orders: UnixStream,
    number: u64, // How often it was started.
}

/// A worker process. Dropping it ends it.
pub(super) struct WorkerProcess {
    workers: Arc<GrammarProcesses>,
    template: u64,
    id: i32,
    pub(super) connection: UnixStream,
    errors: PipeReader,
    has_ended: bool,
}

/// Why a worker has ended.
pub(super) enum Death {
    /// The grammar needed more than a limit allows, or made the library fail.
    OfGrammar(String),
    /// Something else has ended the worker.
    FromOutside,
}

impl GrammarProcesses {
    /// Starts the template: the command [`COMMAND`] of `program`.
    ///
    /// # Errors
    /// If the system does not start the process.
    pub(super) fn start(
        program: PathBuf,
        tokenizer: Arc<Tokenizer>,
        end_tokens: &[TokenId],
    ) -> io::Result<GrammarProcesses> {
        let template = Template::start(&program, &tokenizer, end_tokens, 0)?;
        Ok(GrammarProcesses {
            program,
            tokenizer,
            end_tokens: end_tokens.to_vec(),
            template: Mutex::new(template),
            running: AtomicU64::new(0),
            deaths: AtomicU64::new(0),
        })
    }

    /// Returns a new worker.
    ///
    /// # Errors
    /// If the system starts no process.
    pub(super) fn fork(self: &Arc<Self>) -> io::Result<WorkerProcess> {
        let (connection, of_worker) = UnixStream::pair()?;
        // A worker that stops halfway through a reply must not stop its thread.
        connection.set_read_timeout(Some(REPLY_TIME))?;
        connection.set_write_timeout(Some(REPLY_TIME))?;
        let (errors, of_errors) = pipe()?;
        let files = [OwnedFd::from(of_worker), OwnedFd::from(of_errors)];
        let mut template = self.lock();
        let id = match template.fork(&files) {
            Ok(id) => id,
            Err(error) => {
                tracing::warn!("the template of grammar processes has ended: {error}");
                let number = template.number + 1;
                *template =
                    Template::start(&self.program, &self.tokenizer, &self.end_tokens, number)?;
                template.fork(&files)?
            }
        };
        if id == 0 {
            return Err(io::Error::other("the system starts no further process"));
        }
        self.running.fetch_add(1, Ordering::Relaxed);
        Ok(WorkerProcess {
            workers: Arc::clone(self),
            template: template.number,
            id,
            connection,
            errors,
            has_ended: false,
        })
    }

    /// No method panics halfway through a change, so the state is right even if the lock is
    /// poisoned.
    fn lock(&self) -> MutexGuard<'_, Template> {
        self.template.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Template {
    fn start(
        program: &PathBuf,
        tokenizer: &Tokenizer,
        end_tokens: &[TokenId],
        number: u64,
    ) -> io::Result<Template> {
        let (orders, of_template) = UnixStream::pair()?;
        orders.set_read_timeout(Some(ORDER_TIME))?;
        orders.set_write_timeout(Some(ORDER_TIME))?;
        let process = Command::new(program)
            .arg(COMMAND)
            .env_clear()
            .stdin(OwnedFd::from(of_template))
            .stdout(Stdio::null())
            .spawn()?;
        let template = Template {
            process,
            orders,
            number,
        };
        let source = tokenizer.source();
        let vocabulary = BorrowedVocabulary {
            tokenizer: source,
            end_tokens,
        };
        frames::send(&template.orders, &vocabulary, &source.json)?;
        Ok(template)
    }

    fn fork(&self, files: &[OwnedFd]) -> io::Result<i32> {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        let order = order(FORK, 0);
        let parts = [IoSlice::new(&order)];
        sendmsg(&self.orders, &parts, &mut control, SendFlags::NOSIGNAL)?;
        self.reply()
    }

    fn reply(&self) -> io::Result<i32> {
        let mut reply = [0; 4];
        (&self.orders).read_exact(&mut reply)?;
        Ok(i32::from_le_bytes(reply))
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        // It may have ended already. Its workers end with it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn order(kind: u8, id: i32) -> WorkerOrder {
    let [a, b, c, d] = id.to_le_bytes();
    [kind, a, b, c, d]
}

impl WorkerProcess {
    /// Stops the worker, which takes no processor time until it is resumed.
    pub(super) fn pause(&self) {
        self.send(PAUSE);
    }

    /// Lets a stopped worker go on.
    pub(super) fn resume(&self) {
        self.send(RESUME);
    }

    /// Ends the worker, which may have ended already. Returns the number of the signal that has
    /// ended it, and what it has written before.
    fn end(&mut self) -> (i32, String) {
        self.has_ended = true;
        let Some(signal) = self.send(END) else {
            // The template has ended. A worker that is left ends when its connection is closed.
            let _ = self.connection.shutdown(Shutdown::Both);
            return (Signal::KILL.as_raw(), String::new());
        };
        let mut words = String::new();
        // All writers have gone, so the read ends. What is no text is of no use.
        let _ = (&self.errors)
            .take(MAX_LAST_WORDS)
            .read_to_string(&mut words);
        (signal, words)
    }

    /// Says why a worker whose connection is closed has ended.
    pub(super) fn death(mut self) -> Death {
        let (signal, words) = self.end();
        if signal == Signal::XCPU.as_raw() {
            let limit = format!("{MAX_JOB_SECONDS} seconds of processor time");
            Death::OfGrammar(format!("it took more than {limit}"))
        } else if words.contains("memory allocation") {
            let limit = MAX_MEMORY >> 20;
            Death::OfGrammar(format!("it took more than {limit} MiB of memory"))
        } else if words.contains("overflowed its stack") {
            let limit = STACK_BYTES >> 20;
            Death::OfGrammar(format!("it took more than {limit} MiB of stack"))
        } else if signal == Signal::KILL.as_raw() {
            Death::FromOutside
        } else {
            tracing::error!(signal, words, "a grammar process has failed");
            Death::OfGrammar(BROKEN.to_owned())
        }
    }

    /// Sends an order. Returns the reply to [`END`], unless the worker's template has ended: the
    /// worker has ended with it.
    fn send(&self, kind: u8) -> Option<i32> {
        let template = self.workers.lock();
        if template.number != self.template {
            return None;
        }
        let sent = (&template.orders).write_all(&order(kind, self.id));
        if kind != END {
            return None; // The next order finds out that the template has ended.
        }
        let reply = sent.and_then(|()| template.reply());
        if reply.is_err() {
            // A reply that comes later would be taken for another one.
            let _ = template.orders.shutdown(Shutdown::Both);
        }
        reply.ok()
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        if !self.has_ended {
            drop(self.end());
        }
        self.workers.running.fetch_sub(1, Ordering::Relaxed);
    }
}
