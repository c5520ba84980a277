//! A tenant's policy: its share of the machine, its rates and its limits.

use crate::{Micros, TenantId};

/// The priority of a tenant's requests. Each band has a guaranteed part of the machine when all
/// bands are busy. Other bands use what a band leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Band {
    /// For requests whose user is waiting.
    Interactive,
    /// The default.
    #[default]
    Standard,
    /// For requests without hurry: their decodes may pause.
    Batch,
}

/// A rate limit (the generic cell rate algorithm, ITU-T I.371).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// The number of units earned per minute, at least 1.
    pub per_minute: u32,
    /// The number of units that may be used at once after a pause, at least 1.
    pub burst: u32,
}

/// The unit of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateKind {
    /// Accepted requests.
    Requests,
    /// Prompt tokens that are not cached, and output tokens. An accepted request reserves its
    /// `max_new_tokens` for each choice, and gets back what it did not use when it ends.
    Tokens,
}

/// The state of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateState {
    /// The number of units that may be used at once after a pause.
    pub limit: u32,
    /// The number of units that may be used now.
    pub remaining: u32,
    /// The time until all `limit` units may be used again.
    pub reset: Micros,
}

/// The states of a tenant's rates; `None` for a rate that the tenant does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// The rate of requests.
    pub requests: Option<RateState>,
    /// The rate of tokens.
    pub tokens: Option<RateState>,
}

/// A prefix that the operator has declared public: its number in the order of declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicPrefix(pub u32);

/// A tenant's share, rates and limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantPolicy {
    /// The priority of its requests.
    pub band: Band,
    /// Its share of the machine and of the cache, relative to other tenants, at least 1.
    pub weight: u32,
    /// The rate of its requests.
    pub requests: Option<Rate>,
    /// The rate of its tokens.
    pub tokens: Option<Rate>,
    /// The largest number of its running sequences, at least 1.
    pub max_running: u32,
    /// The largest number of its waiting requests, at least 1. Every request waits until the next
    /// plan, even if the machine is idle. The choices of a request take one place.
    pub max_queued: u32,
    /// The largest predicted machine time of its waiting requests. A single request may always
    /// wait.
    pub max_queued_time: Micros,
    /// The number of pages that it gets whatever others use. Others may use them while it does not.
    /// Their sequences lose them when it needs them.
    pub guaranteed_pages: u32,
    /// The largest number of pages that it may hold, including cached pages, at least 1.
    pub max_pages: u32,
    /// The public prefixes that it may use.
    pub public: Vec<PublicPrefix>,
}

/// The parts of the machine that the bands get when all are busy, in percent.
pub(crate) const BAND_PERCENT: [u64; 3] = [60, 30, 10];

impl Default for TenantPolicy {
    /// Returns a policy of weight 1 without limits of its own.
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
    /// Returns the tenant's share of a full queue, relative to other tenants: its weight times the
    /// part of its band, and more by the part of all `pages` that it is guaranteed.
    pub fn queue_share(&self, pages: u32) -> u64 {
        let pages = u64::from(pages) + u64::from(self.guaranteed_pages);
        u64::from(self.weight) * BAND_PERCENT[self.band as usize] * pages
    }

    /// Checks the policy by itself. `prefixes` public prefixes are declared.
    pub(crate) fn check(&self, id: TenantId, prefixes: u32) -> Result<(), TenantsError> {
        let is_positive = |rate: &Rate| rate.per_minute > 0 && rate.burst > 0;
        let rates = [&self.requests, &self.tokens];
        let is_valid = self.weight > 0
            && self.max_running > 0
            && self.max_queued > 0
            && self.max_pages > 0
            && self.guaranteed_pages <= self.max_pages
            && rates.into_iter().flatten().all(is_positive);
        if !is_valid {
            return Err(TenantsError::Invalid(id));
        }
        match self.public.iter().find(|prefix| prefix.0 >= prefixes) {
            Some(unknown) => Err(TenantsError::UnknownPrefix(id, *unknown)),
            None => Ok(()),
        }
    }
}

/// The reason why a set of tenants is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TenantsError {
    /// A weight, a limit or a part of a rate is 0, or the guarantee is larger than the cap.
    Invalid(TenantId),
    /// The policy names a public prefix that is not declared.
    UnknownPrefix(TenantId, PublicPrefix),
    /// More pages are guaranteed than there are without the public prefixes.
    TooManyGuaranteed {
        /// The guaranteed pages of all tenants.
        guaranteed: u64,
        /// All pages except the pages of the public prefixes.
        limit: u64,
    },
}

/// A tenant's state in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantState {
    /// Its running sequences.
    pub running: u32,
    /// Its waiting requests.
    pub queued: u32,
    /// The pages that it holds, including cached pages.
    pub pages: u32,
    /// The machine time that it was charged so far.
    pub service: Micros,
}
