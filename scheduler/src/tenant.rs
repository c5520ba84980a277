//! A tenant's share of the machine, its rates and its limits.

use crate::{Micros, TenantId};

/// How soon a tenant's requests are wanted. Each band has a part of the machine for certain when all are busy; what one
/// leaves, the next may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Band {
    /// Somebody is waiting.
    Interactive,
    /// The usual.
    #[default]
    Standard,
    /// Whenever there is time: its decodes may pause.
    Batch,
}

/// So much a minute, and so much at once (the generic cell rate algorithm, ITU-T I.371).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// What a minute brings; at least 1.
    pub per_minute: u32,
    /// What may be used at once after a pause; at least 1.
    pub burst: u32,
}

/// Which rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateKind {
    /// Accepted requests.
    Requests,
    /// Prompt tokens that are not cached, and output tokens.
    Tokens,
}

/// Where a rate stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateState {
    /// What may be used at once.
    pub limit: u32,
    /// What may be used now.
    pub remaining: u32,
    /// Until all may be used again.
    pub reset: Micros,
}

/// Where a tenant's rates stand; those it has none of are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Requests.
    pub requests: Option<RateState>,
    /// Tokens.
    pub tokens: Option<RateState>,
}

/// A prefix that the operator has made public: its place in the order of declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicPrefix(pub u32);

/// What a tenant may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantPolicy {
    /// How soon.
    pub band: Band,
    /// Its share of the machine and of the cache, relative to the other tenants'; at least 1.
    pub weight: u32,
    /// Requests a minute.
    pub requests: Option<Rate>,
    /// Tokens a minute.
    pub tokens: Option<Rate>,
    /// Sequences that run at the same time; at least 1.
    pub max_running: u32,
    /// Requests that wait; at least 1, for each waits until the next plan, however idle the machine is.
    pub max_queued: u32,
    /// Predicted machine time of the requests that wait.
    pub max_queued_time: Micros,
    /// Pages that others cannot keep from it.
    pub guaranteed_pages: u32,
    /// Pages that it may hold, cached ones included; at least 1.
    pub max_pages: u32,
    /// The public prefixes that it may use.
    pub public: Vec<PublicPrefix>,
}

impl Default for TenantPolicy {
    /// Weight 1 and no limits of its own.
    fn default() -> TenantPolicy {
        TenantPolicy {
            band: Band::Standard,
            weight: 1,
            requests: None,
            tokens: None,
            max_running: u32::MAX,
            max_queued: u32::MAX,
            max_queued_time: Micros::MAX,
            guaranteed_pages: 0,
            max_pages: u32::MAX,
            public: Vec::new(),
        }
    }
}

impl TenantPolicy {
    /// Whether it makes sense by itself, among so many public prefixes.
    pub(crate) fn check(&self, id: TenantId, prefixes: u32) -> Result<(), TenantsError> {
        let positive = |rate: &Rate| rate.per_minute > 0 && rate.burst > 0;
        let rates = [&self.requests, &self.tokens];
        let is_valid = self.weight > 0
            && self.max_running > 0
            && self.max_queued > 0
            && self.max_pages > 0
            && self.guaranteed_pages <= self.max_pages
            && rates.into_iter().flatten().all(positive);
        if !is_valid {
            return Err(TenantsError::Invalid(id));
        }
        match self.public.iter().find(|prefix| prefix.0 >= prefixes) {
            Some(unknown) => Err(TenantsError::UnknownPrefix(id, *unknown)),
            None => Ok(()),
        }
    }
}

/// Why a set of tenants cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TenantsError {
    /// A weight, a cap or a part of a rate is 0, or a guarantee larger than the cap.
    Invalid(TenantId),
    /// It may use a public prefix that nobody has declared.
    UnknownPrefix(TenantId, PublicPrefix),
    /// More pages are guaranteed than there are beside the public prefixes.
    TooManyGuaranteed {
        /// Over all tenants.
        guaranteed: u64,
        /// All pages but those of the public prefixes.
        limit: u64,
    },
}

/// A tenant in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantState {
    /// Its sequences that run.
    pub running: u32,
    /// Its requests that wait.
    pub queued: u32,
    /// Pages it holds, cached ones included.
    pub pages: u32,
    /// Machine time that it was charged so far.
    pub service: Micros,
}
