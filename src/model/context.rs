//! What all layers of one forward pass work with.

use sterna_scheduler::Batch;

use super::kv_store::KvStore;
use super::placement::Placement;
use super::profile::Profile;
use super::workers::Workers;

/// What the layers of a forward pass share.
pub(super) struct ForwardContext<'a> {
    pub(super) workers: &'a mut Workers,
    pub(super) batch: &'a Batch,
    pub(super) placement: &'a Placement,
    pub(super) kv: &'a mut KvStore,
    pub(super) profile: &'a mut Profile,
}
