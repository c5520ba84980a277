//! The threads that compute masks.
//!
//! Each answer belongs to one thread, which has its parser. The engine tells that thread of each
//! drawn token, and the thread computes the next masks while the model computes the next logits.
//! The answers of several tenants take turns.
//!
//! Invariant: a parser consumes only tokens that were drawn or that its grammar forces.
//!
//! Invariant: what goes wrong with one answer ends that answer only. A panic ends no thread.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use llguidance::Matcher;

use super::TokenId;
use super::compiled::CompiledGrammar;
use super::fair_queue::FairQueue;
use super::masks::{MaskState, TokenMasks};
use super::window::{LastMask, Window, plain_error};

/// The senders to the mask threads. The threads end once the senders are dropped and the last
/// answer has ended.
pub(super) struct MaskThreads {
    senders: Vec<mpsc::Sender<MaskMessage>>, // One for each thread.
    next: AtomicU64,
}

/// An answer that follows a grammar. Dropping it ends it.
pub struct ConstrainedOutput {
    id: u64,
    masks: Arc<TokenMasks>,
    drawn: AtomicU32, // The number of drawn tokens.
    thread: mpsc::Sender<MaskMessage>,
}

enum MaskMessage {
    Begin(u64, Box<Answer>),
    Drawn(u64, TokenId),
    End(u64),
}

impl MaskThreads {
    /// Starts `count` threads.
    ///
    /// # Errors
    /// If the system does not start a thread.
    pub(super) fn start(count: usize) -> io::Result<MaskThreads> {
        let start = |index: usize| {
            let (sender, messages) = mpsc::channel();
            let thread = thread::Builder::new().name(format!("sterna-mask-{index}"));
            thread.spawn(move || MaskThread::new().run(&messages))?;
            Ok(sender)
        };
        let senders: io::Result<Vec<_>> = (0..count).map(start).collect();
        Ok(MaskThreads {
            senders: senders?,
            next: AtomicU64::new(0),
        })
    }

    /// Begins an answer. The first masks come from the compiled grammar, so they are ready at once.
    pub(super) fn begin(
        &self,
        grammar: Arc<CompiledGrammar>,
        tenant: u32,
        stop_tokens: &[TokenId],
    ) -> ConstrainedOutput {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let thread = self.senders[id as usize % self.senders.len()].clone();
        let masks = TokenMasks::new(grammar.vocabulary(), grammar.first(), stop_tokens);
        let masks = Arc::new(masks);
        let answer = Answer {
            ahead: grammar.first().forced.iter().copied().collect(),
            tokens: 0,
            drawn: None,
            stop_tokens: stop_tokens.to_vec(),
            tenant,
            grammar,
            matcher: None,
            masks: Arc::clone(&masks),
        };
        // A thread that has ended drops the answer, which then says so in the masks.
        drop(thread.send(MaskMessage::Begin(id, Box::new(answer))));
        ConstrainedOutput {
            id,
            masks,
            drawn: AtomicU32::new(0),
            thread,
        }
    }
}

impl ConstrainedOutput {
    /// Returns the masks.
    pub fn masks(&self) -> &TokenMasks {
        &self.masks
    }

    /// Returns whether the mask of the next token is known, or will never be.
    pub fn is_ready(&self) -> bool {
        let drawn = self.drawn.load(Ordering::Relaxed) as usize;
        !matches!(self.masks.at(drawn), MaskState::Pending)
    }

    /// Returns the tokens that the grammar forces next, as far as they are known.
    pub fn forced(&self) -> impl Iterator<Item = TokenId> + '_ {
        let drawn = self.drawn.load(Ordering::Relaxed) as usize;
        self.masks.forced_after(drawn)
    }

    /// Says that `token` was drawn. The next mask is computed from now on.
    pub fn drawn(&self, token: TokenId) {
        self.drawn.fetch_add(1, Ordering::Relaxed);
        if self
            .thread
            .send(MaskMessage::Drawn(self.id, token))
            .is_err()
        {
            self.masks.abandon();
        }
    }
}

impl Drop for ConstrainedOutput {
    fn drop(&mut self) {
        // A thread that has ended has dropped the answer already.
        drop(self.thread.send(MaskMessage::End(self.id)));
    }
}

/// The thread's part of an answer.
struct Answer {
    grammar: Arc<CompiledGrammar>,
    matcher: Option<Matcher>, // `None` before the first mask that the grammar has not computed.
    ahead: VecDeque<TokenId>, // Forced tokens that are not drawn yet.
    tokens: u32,              // The drawn tokens.
    drawn: Option<TokenId>,   // The last one, until the next masks are computed.
    stop_tokens: Vec<TokenId>,
    tenant: u32,
    masks: Arc<TokenMasks>,
}

impl Answer {
    /// Takes a drawn token. Returns whether new masks are needed.
    fn take(&mut self, token: TokenId) -> bool {
        self.tokens += 1;
        if let Some(forced) = self.ahead.pop_front() {
            assert_eq!(token, forced, "a mask with one token allows only that");
            return false;
        }
        self.drawn = Some(token);
        true
    }

    /// Computes and publishes the masks after the drawn token.
    fn compute(&mut self) {
        let token = self.drawn.take().expect("a token was drawn");
        let matcher = (self.matcher).get_or_insert_with(|| self.grammar.parser());
        let window = match matcher.consume_token(token) {
            Ok(()) => Window::next(matcher),
            Err(error) => Window {
                forced: Vec::new(),
                last: LastMask::DeadEnd(plain_error(error)),
            },
        };
        self.ahead.extend(&window.forced);
        (self.masks).publish(self.tokens, &window, &self.stop_tokens);
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.masks.abandon(); // Nobody reads them any more, unless the thread has panicked.
    }
}

struct MaskThread {
    answers: HashMap<u64, Box<Answer>>,
    due: FairQueue<u64>, // Answers whose next masks are needed.
}

impl MaskThread {
    fn new() -> MaskThread {
        MaskThread {
            answers: HashMap::new(),
            due: FairQueue::new(usize::MAX), // The scheduler limits the answers.
        }
    }

    fn run(&mut self, messages: &mpsc::Receiver<MaskMessage>) {
        loop {
            while let Ok(message) = messages.try_recv() {
                self.take(message);
            }
            if let Some(id) = self.due.pop() {
                self.guarded(id, Answer::compute);
                continue;
            }
            match messages.recv() {
                Ok(message) => self.take(message),
                Err(mpsc::RecvError) => return,
            }
        }
    }

    fn take(&mut self, message: MaskMessage) {
        match message {
            MaskMessage::Begin(id, answer) => {
                self.answers.insert(id, answer);
            }
            MaskMessage::Drawn(id, token) => {
                let due = self.guarded(id, |answer| answer.take(token).then_some(answer.tenant));
                if let Some(tenant) = due.flatten() {
                    let entered = self.due.push(tenant, id);
                    entered.expect("the queue is never full");
                }
            }
            MaskMessage::End(id) => drop(self.answers.remove(&id)),
        }
    }

    /// Does something with an answer, unless it has ended. A panic ends it.
    fn guarded<T>(&mut self, id: u64, work: impl FnOnce(&mut Answer) -> T) -> Option<T> {
        let answer = self.answers.get_mut(&id)?;
        let done = catch_unwind(AssertUnwindSafe(|| work(answer)));
        if done.is_err() {
            self.answers.remove(&id);
        }
        done.ok()
    }
}
