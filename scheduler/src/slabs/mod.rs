//! The slabs of state memory, for models with recurrent layers.
//!
//! A slab is to recurrent layers what pages are to attention: it holds what the layers keep of all
//! tokens of a sequence up to a position. It has a fixed size, and it cannot be cut: only the
//! position at which it was written, and the few positions before it that [`RowStates`] names, can
//! be continued.

mod pool;

pub use pool::SlabCounts;
pub(crate) use pool::{PageState, SlabPool, Worth};

/// A slab of state memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateSlab(u32);

impl StateSlab {
    /// Creates the handle of slab `index`.
    pub fn new(index: u32) -> StateSlab {
        StateSlab(index)
    }

    /// Returns the index of the slab.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// How many slabs there are, and what a row may do with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateLimits {
    /// The number of slabs, at least one more than the sequences that run at the same time.
    pub slabs: u32,
    /// The largest number of tokens of a row that changes its slab in place, at least 1. The model
    /// can continue such a row's slab at the row's start, at its end and between them. So a step
    /// can be computed again after a failure, and drafts can be rejected.
    pub in_place_tokens: u32,
    /// A state is kept each time that a sequence has passed so many tokens, in case a prompt
    /// diverges behind it or the sequence is preempted; a multiple of
    /// [`PAGE_TOKENS`](crate::PAGE_TOKENS).
    pub trial_interval: u32,
}

/// The states that a row reads and writes.
///
/// A slab can be continued at the end of the row that wrote it and at the position before its end.
/// If that row had at most `in_place_tokens` tokens, the slab can be continued at every position
/// from the start of that row to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowStates {
    /// The state at the row's start. `None` for a state of no token, as at position 0.
    pub from: Option<StateSlab>,
    /// The slab that gets the state at the row's end. It is `from` only if the row has at most
    /// `in_place_tokens` tokens and no other sequence reads `from`. Otherwise the step leaves
    /// `from` as it is, so the step can be computed again.
    pub to: StateSlab,
    /// States inside the row to keep in slabs of their own.
    pub keep: [Option<KeptState>; 2],
}

/// A state to keep. Such a slab can be continued at its position and at the position before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptState {
    /// The number of tokens that the state has seen: after the row's start and before its end.
    pub position: u32,
    /// The slab that gets the state. No other row of the step reads or writes it.
    pub slab: StateSlab,
}
