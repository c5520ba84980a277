//! The shape of recurrent layers.

use crate::checkpoint::FileOrder;

/// The layers of a model that are recurrent: a gated delta rule instead of attention.
#[derive(Clone, Debug, PartialEq)]
pub struct RecurrentLayers {
    /// Whether each layer of the model is recurrent.
    pub is_recurrent: Vec<bool>,
    /// The number of heads of queries and keys.
    pub key_heads: usize,
    /// The number of heads of values, a multiple of `key_heads`. Neighbouring value heads belong to
    /// one key head.
    pub value_heads: usize,
    /// The number of values in a head of queries or keys.
    pub key_dim: usize,
    /// The number of values in a head of values.
    pub value_dim: usize,
    /// The number of tokens that the convolution sees, the token itself included.
    pub taps: usize,
}

impl RecurrentLayers {
    /// Returns the number of value heads of a key head.
    pub fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Returns the number of channels of the convolution: queries, keys, values.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.values()
    }

    /// Returns the number of values of all value heads.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the value head that is number `member` of a key head.
    pub fn value_head(&self, key_head: usize, member: usize) -> usize {
        key_head * self.group() + member
    }

    /// Returns the order of rows or columns of a GGUF file after `first` of them that are of no
    /// value head. Each value head has `dim` of them.
    pub(crate) fn in_tiles(&self, first: usize, dim: usize) -> FileOrder {
        FileOrder::Tiled {
            first,
            key_heads: self.key_heads,
            group: self.group(),
            dim,
        }
    }

    /// Returns the bytes of the states of one sequence, all layers: what a decode reads and writes.
    pub fn state_bytes(&self) -> usize {
        let state = self.key_dim * self.value_dim * size_of::<f32>();
        self.layers() * self.value_heads * state
    }

    /// Returns how many layers are recurrent.
    pub fn layers(&self) -> usize {
        self.is_recurrent.iter().filter(|is| **is).count()
    }
}
