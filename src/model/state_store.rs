//! The state store: what recurrent layers keep of the tokens of each sequence, by slab.
//!
//! Invariant: the memory of a layer is `[key head][slab][region]`. A worker computes whole key
//! heads, so it owns their memory in all slabs, and it can copy from one slab to another.
//!
//! Invariant: the states in a region have seen the tokens before the region's `base`. The journal
//! has what the tokens from `base` on leave to add, and the inputs of the convolution go as far
//! back as a token at `base` needs. So a row can begin at any position that the journal reaches:
//! a step can be computed again, and a row can begin behind its rejected drafts.
//!
//! The memory is taken as that of the KV store: some at the start, the rest while the engine is
//! idle.

use std::io;
use std::ops::Range;

use sterna_kernels::HugeSlice;
use sterna_scheduler::{RowStates, StateSlab};

use super::pool::split_rows;
use crate::checkpoint::RecurrentLayers;

/// The first values of a region: its base, and padding up to a cache line.
const HEADER: usize = 16;

/// The slabs of a sequence whose rows are made without a scheduler: two, in turn. Rows of any
/// length may follow each other. Without recurrent layers the slabs mean nothing.
#[derive(Clone, Copy, Debug)]
pub struct AlternatingSlabs {
    first: u32,
    last: Option<u32>, // 0 or 1.
}

impl AlternatingSlabs {
    /// Returns slabs 2 · `index` and the one after it, for a sequence that begins.
    pub fn new(index: u32) -> AlternatingSlabs {
        AlternatingSlabs {
            first: 2 * index,
            last: None,
        }
    }

    /// Returns the states of the next row.
    pub fn next_row(&mut self) -> RowStates {
        let slab = |index| StateSlab::new(self.first + index);
        let to = self.last.map_or(0, |last| 1 - last);
        let states = RowStates {
            from: self.last.map(slab),
            to: slab(to),
            keep: [None; 2],
        };
        self.last = Some(to);
        states
    }
}

/// The sizes of the states of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StateShape {
    pub(super) layers: usize,
    pub(super) key_heads: usize,
    /// The value heads of a key head.
    pub(super) group: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    /// The tokens that the convolution sees.
    pub(super) taps: usize,
    /// The tokens that the journal holds.
    pub(super) in_place_tokens: usize,
}

impl StateShape {
    pub(super) fn new(layers: &RecurrentLayers, in_place_tokens: usize) -> StateShape {
        StateShape {
            layers: layers.layers(),
            key_heads: layers.key_heads,
            group: layers.group(),
            key_dim: layers.key_dim,
            value_dim: layers.value_dim,
            taps: layers.taps,
            in_place_tokens,
        }
    }

    /// Returns the channels of the convolution of a key head: its query, its key, its values.
    pub(super) fn channels(self) -> usize {
        2 * self.key_dim + self.values()
    }

    /// Returns the values of the value heads of a key head.
    pub(super) fn values(self) -> usize {
        self.group * self.value_dim
    }

    /// Returns the number of inputs of the convolution that a region keeps.
    pub(super) fn inputs(self) -> usize {
        self.taps - 1 + self.in_place_tokens
    }

    /// Returns the values of the journal for a token: a key, and a delta and a decay of each value
    /// head.
    fn entry(self) -> usize {
        self.key_dim + self.values() + self.group
    }

    /// Returns the values of one state.
    pub(super) fn state(self) -> usize {
        self.key_dim * self.value_dim
    }

    /// Returns the values of a region, whole cache lines.
    fn region(self) -> usize {
        let inputs = self.inputs() * self.channels();
        let journal = self.in_place_tokens * self.entry();
        (HEADER + self.group * self.state() + inputs + journal).next_multiple_of(HEADER)
    }

    /// Returns the bytes of a slab, all layers.
    pub(super) fn slab_bytes(self) -> usize {
        self.layers * self.key_heads * self.region() * size_of::<f32>()
    }
}

/// The states of all slabs.
pub(super) struct StateStore {
    shape: StateShape,
    slabs: usize,
    values: HugeSlice<f32>,
    taken: usize, // Of `values`, whose memory is taken from its start on.
}

impl StateStore {
    /// Reserves the memory for `slabs` slabs.
    ///
    /// # Errors
    /// If the system does not have it.
    pub(super) fn new(shape: StateShape, slabs: usize) -> io::Result<StateStore> {
        let values = slabs * shape.slab_bytes() / size_of::<f32>();
        Ok(StateStore {
            shape,
            slabs,
            values: HugeSlice::reserve(values)?,
            taken: 0,
        })
    }

    /// Takes the next `bytes` of the memory that is not taken yet. Returns whether there is more to
    /// take.
    ///
    /// # Errors
    /// If the system does not have the memory and says so.
    pub(super) fn take_memory(&mut self, bytes: usize) -> io::Result<bool> {
        let values = bytes / size_of::<f32>();
        let end = self.values.len().min(self.taken + values);
        self.values.commit(self.taken..end)?;
        self.taken = end;
        Ok(end < self.values.len())
    }

    pub(super) fn shape(&self) -> StateShape {
        self.shape
    }

    /// Forgets what a slab holds, as if the tokens before `base` had left nothing.
    pub(super) fn clear(&mut self, slab: StateSlab, base: usize) {
        for layer in 0..self.shape.layers {
            let heads = self.shape.key_heads;
            for mut states in self.heads_mut(layer, std::iter::once(0..heads)) {
                (0..heads).for_each(|head| states.region(head, slab).clear(base));
            }
        }
    }

    /// Returns the memory of a layer, cut at ranges of key heads that are contiguous from 0.
    pub(super) fn heads_mut(
        &mut self,
        layer: usize,
        heads: impl IntoIterator<Item = Range<usize>>,
    ) -> impl Iterator<Item = HeadStates<'_>> {
        let (shape, slabs) = (self.shape, self.slabs);
        let head = slabs * shape.region();
        let layer = &mut self.values[layer * shape.key_heads * head..][..shape.key_heads * head];
        split_rows(layer, head, heads).map(move |values| HeadStates {
            shape,
            slabs,
            values,
        })
    }
}

/// The regions of some key heads of a layer, in all slabs.
pub(super) struct HeadStates<'a> {
    shape: StateShape,
    slabs: usize,
    values: &'a mut [f32],
}

impl HeadStates<'_> {
    /// Returns the region of key head `head` of these in a slab.
    ///
    /// # Panics
    /// If there is no such slab.
    pub(super) fn region(&mut self, head: usize, slab: StateSlab) -> Region<'_> {
        let place = self.place(head, slab);
        Region::new(self.shape, &mut self.values[place])
    }

    /// Copies a region to another slab.
    pub(super) fn copy(&mut self, head: usize, from: StateSlab, to: StateSlab) {
        let (from, to) = (self.place(head, from), self.place(head, to));
        self.values.copy_within(from, to.start);
    }

    fn place(&self, head: usize, slab: StateSlab) -> Range<usize> {
        let (slab, slabs, size) = (slab.index(), self.slabs, self.shape.region());
        assert!(slab < slabs, "no slab {slab} of {slabs}");
        let start = (head * slabs + slab) * size;
        start..start + size
    }
}

/// What a key head of one layer keeps of a sequence.
pub(super) struct Region<'a> {
    base: &'a mut f32,
    /// The states of the value heads, as the kernel `delta_step` reads them.
    pub(super) states: &'a mut [f32],
    /// The inputs of the convolution, `[position mod inputs][channel]`.
    inputs: &'a mut [f32],
    /// `[position mod in_place_tokens][entry]`.
    journal: &'a mut [f32],
    shape: StateShape,
}

/// What a token leaves to add to the states of a key head.
pub(super) struct JournalEntry<'a> {
    pub(super) key: &'a mut [f32],
    /// `[value head][column]`.
    pub(super) deltas: &'a mut [f32],
    /// By value head.
    pub(super) decays: &'a mut [f32],
}

impl<'a> Region<'a> {
    fn new(shape: StateShape, values: &'a mut [f32]) -> Region<'a> {
        let (header, rest) = values.split_at_mut(HEADER);
        let (states, rest) = rest.split_at_mut(shape.group * shape.state());
        let (inputs, rest) = rest.split_at_mut(shape.inputs() * shape.channels());
        let journal = &mut rest[..shape.in_place_tokens * shape.entry()];
        Region {
            base: &mut header[0],
            states,
            inputs,
            journal,
            shape,
        }
    }

    /// Forgets everything: the tokens before `base` left nothing.
    pub(super) fn clear(&mut self, base: usize) {
        self.set_base(base);
        self.states.fill(0.0);
        self.inputs.fill(0.0);
    }

    /// Returns the number of tokens that the states have seen.
    pub(super) fn base(&self) -> usize {
        self.base.to_bits() as usize
    }

    pub(super) fn set_base(&mut self, base: usize) {
        *self.base = f32::from_bits(base as u32);
    }

    /// Returns the input of the convolution at a position. Before the first token it is zero.
    pub(super) fn input(&self, position: usize) -> &[f32] {
        let channels = self.shape.channels();
        &self.inputs[position % self.shape.inputs() * channels..][..channels]
    }

    pub(super) fn input_mut(&mut self, position: usize) -> &mut [f32] {
        let channels = self.shape.channels();
        &mut self.inputs[position % self.shape.inputs() * channels..][..channels]
    }

    /// Returns the journal's entry of the token at a position.
    pub(super) fn entry(&mut self, position: usize) -> JournalEntry<'_> {
        let shape = self.shape;
        let size = shape.entry();
        let entry = &mut self.journal[position % shape.in_place_tokens * size..][..size];
        let (key, rest) = entry.split_at_mut(shape.key_dim);
        let (deltas, decays) = rest.split_at_mut(shape.values());
        JournalEntry {
            key,
            deltas,
            decays,
        }
    }
}
