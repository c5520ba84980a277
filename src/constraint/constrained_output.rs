//! A compiled grammar, and the answers that follow it, as the engine sees them.

use std::fmt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};

use rustix::net::{RecvFlags, recv};

use super::TokenId;
use super::masks::{MaskState, TokenMasks};
use super::window::Window;

/// What an answer hears whose grammar has no thread any more.
pub(super) const NO_THREAD: &str = "the thread of its grammar has ended";

/// A compiled grammar. Any number of answers can follow it. Clones share it.
#[derive(Clone)]
pub struct Grammar {
    shared: Arc<CompiledGrammar>,
}

/// What the answers that follow a grammar share.
pub(super) struct CompiledGrammar {
    pub(super) thread: mpsc::Sender<MaskMessage>,
    pub(super) first: Window,
    pub(super) vocabulary: usize,
    pub(super) answers: AtomicU64, // Begun so far.
    pub(super) connection: UnixStream,
    /// Set when the grammar has ended its worker: which limit it has exceeded.
    pub(super) excess: Arc<OnceLock<String>>,
    /// What its worker takes, in bytes.
    pub(super) memory: u64,
}

/// An answer that follows a grammar. Dropping it ends it.
pub struct ConstrainedOutput {
    id: u64,
    masks: Arc<TokenMasks>,
    drawn: AtomicU32, // The number of drawn tokens.
    thread: mpsc::Sender<MaskMessage>,
}

/// What the thread of a grammar hears of.
pub(super) enum MaskMessage {
    Begin(u64, NewAnswer),
    Drawn(u64, TokenId),
    End(u64),
}

/// An answer that begins.
pub(super) struct NewAnswer {
    pub(super) masks: Arc<TokenMasks>,
    pub(super) stop_tokens: Vec<TokenId>,
}

impl Grammar {
    pub(super) fn new(compiled: CompiledGrammar) -> Grammar {
        let shared = Arc::new(compiled);
        Grammar { shared }
    }

    /// Begins an answer that follows the grammar. Each of `stop_tokens` ends it. The first masks
    /// come from the compilation, so they are ready at once.
    pub fn begin(&self, stop_tokens: &[TokenId]) -> ConstrainedOutput {
        let shared = &self.shared;
        let masks = TokenMasks::new(shared.vocabulary, &shared.first, stop_tokens);
        let masks = Arc::new(masks);
        let id = shared.answers.fetch_add(1, Ordering::Relaxed);
        let answer = NewAnswer {
            masks: Arc::clone(&masks),
            stop_tokens: stop_tokens.to_vec(),
        };
        let thread = shared.thread.clone();
        if thread.send(MaskMessage::Begin(id, answer)).is_err() {
            masks.abandon(NO_THREAD);
        }
        ConstrainedOutput {
            id,
            masks,
            drawn: AtomicU32::new(0),
            thread,
        }
    }

    /// Returns the limit that the grammar has exceeded, if it has ended its worker.
    pub(super) fn excess(&self) -> Option<&String> {
        self.shared.excess.get()
    }

    /// Returns whether the worker of the grammar runs.
    pub(super) fn is_alive(&self) -> bool {
        let look = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let closed = recv(&self.shared.connection, &mut [0; 1][..], look);
        !matches!(closed, Ok((_, 0))) && self.excess().is_none()
    }

    /// Returns what the worker of the grammar takes, in bytes.
    pub(super) fn memory(&self) -> u64 {
        self.shared.memory
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammar")
    }
}

impl PartialEq for Grammar {
    /// Returns whether both are the same compiled grammar.
    fn eq(&self, other: &Grammar) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
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
            self.masks.abandon(NO_THREAD);
        }
    }
}

impl Drop for ConstrainedOutput {
    fn drop(&mut self) {
        // A thread that has ended has dropped the answer already.
        drop(self.thread.send(MaskMessage::End(self.id)));
    }
}
