//! The names of tokens, sequences and tenants, and the unit of time.

/// Microseconds on the caller's clock, which never runs backwards.
pub type Micros = u64;

/// One token of the model's vocabulary.
pub type TokenId = u32;

/// A request's handle from `submit` to its `Finished` event.
///
/// Slots are reused and generations are not, so the handle of an ended request is never the handle
/// of another request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    slot: u32,
    generation: u32,
}

impl SequenceId {
    /// Creates the handle of `generation` in `slot`. Callers that build a batch by hand use it.
    pub fn new(slot: u32, generation: u32) -> SequenceId {
        SequenceId { slot, generation }
    }

    pub(crate) fn slot(self) -> usize {
        self.slot as usize
    }
}

/// The tenant that a request is charged to, and whose cached prefixes it may use. Tenants share no
/// pages except the pages of public prefixes.
///
/// The number is an index into tables, so it should be small. Tenant 0 exists from the start, with
/// [the default policy](crate::TenantPolicy::default).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

/// One of the clients that share a tenant, such as a user of its gateway. The number identifies the
/// client and is no index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubTenant(pub u64);

impl TenantId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}
