//! Every tenant: what it may have, what it has, what it was charged.

use std::collections::VecDeque;
use std::ops::{Index, IndexMut};

use super::Waiting;
use super::rate::Meter;
use crate::{Micros, Nanos, RateKind, Rates, TenantId, TenantPolicy};

/// Output tokens that a tenant's requests are taken to have before any has ended.
const FIRST_GUESS: u64 = 128;

/// One tenant.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) policy: TenantPolicy,
    pub(crate) waiting: VecDeque<Waiting>, // By arrival.
    pub(crate) running: u32,
    pub(crate) queued_time: Nanos,
    pub(crate) service: Nanos, // All that it was ever charged.
    pub(crate) virtual_time: u64,
    pub(crate) remainder: u64, // Of the charges, less than the weight.
    pub(crate) charged: Nanos, // Not in `service` and `virtual_time` yet.
    pub(crate) planned: Nanos, // As if charged, until the plan ends.
    requests: Option<Meter>,
    tokens: Option<Meter>,
    mean_output: u64, // Tokens of an answer, a moving average, times 16.
}

impl Tenant {
    fn new(policy: TenantPolicy) -> Tenant {
        Tenant {
            requests: policy.requests.map(Meter::new),
            tokens: policy.tokens.map(Meter::new),
            policy,
            waiting: VecDeque::new(),
            running: 0,
            queued_time: 0,
            service: 0,
            virtual_time: 0,
            remainder: 0,
            charged: 0,
            planned: 0,
            mean_output: FIRST_GUESS * 16,
        }
    }

    /// Other terms from now on; what was used stays used.
    fn set(&mut self, now: Micros, policy: TenantPolicy) {
        let meter = |old: Option<Meter>, rate| match (old, rate) {
            (Some(old), Some(rate)) => Some(old.at_rate(now, rate)),
            (None, Some(rate)) => Some(Meter::new(rate)),
            (_, None) => None,
        };
        self.requests = meter(self.requests, policy.requests);
        self.tokens = meter(self.tokens, policy.tokens);
        self.remainder = 0;
        self.policy = policy;
    }

    /// Whether anything of it runs or waits.
    pub(crate) fn is_active(&self) -> bool {
        self.running > 0 || !self.waiting.is_empty()
    }

    /// Its virtual time after what this plan holds for it.
    pub(crate) fn planned_time(&self) -> u64 {
        self.virtual_time + self.planned / u64::from(self.policy.weight)
    }

    /// The machine time that took it from an earlier virtual time to its own.
    pub(crate) fn machine_time_since(&self, earlier: u64) -> Nanos {
        let ahead = self.virtual_time.saturating_sub(earlier);
        ahead.saturating_mul(u64::from(self.policy.weight))
    }

    /// Which rate allows nothing now, and when it will.
    pub(crate) fn conforms(&self, now: Micros) -> Result<(), (RateKind, Micros)> {
        let rates = [
            (RateKind::Requests, &self.requests),
            (RateKind::Tokens, &self.tokens),
        ];
        let late = rates.into_iter().filter_map(|(kind, meter)| {
            let wait = meter.as_ref()?.conforms(now).err()?;
            Some((kind, wait))
        });
        match late.max_by_key(|&(_, wait)| wait) {
            Some(late) => Err(late),
            None => Ok(()),
        }
    }

    /// A request with so many prompt tokens to compute is accepted.
    pub(crate) fn charge_request(&mut self, now: Micros, tokens: u64) {
        if let Some(meter) = &mut self.requests {
            meter.charge(now, 1);
        }
        self.charge_tokens(now, tokens);
    }

    pub(crate) fn charge_tokens(&mut self, now: Micros, tokens: u64) {
        if let Some(meter) = &mut self.tokens {
            meter.charge(now, tokens);
        }
    }

    /// A request ended before it began.
    pub(crate) fn refund_request(&mut self, tokens: u64) {
        if let Some(meter) = &mut self.requests {
            meter.refund(1);
        }
        self.refund_tokens(tokens);
    }

    /// Prompt tokens that were charged turned out to be cached.
    pub(crate) fn refund_tokens(&mut self, tokens: u64) {
        if let Some(meter) = &mut self.tokens {
            meter.refund(tokens);
        }
    }

    pub(crate) fn rates(&self, now: Micros) -> Rates {
        Rates {
            requests: self.requests.as_ref().map(|meter| meter.state(now)),
            tokens: self.tokens.as_ref().map(|meter| meter.state(now)),
        }
    }

    /// Tokens that an answer which may have `most` should come to.
    pub(crate) fn expected_output(&self, most: usize) -> usize {
        (self.mean_output as usize / 16).clamp(1, most)
    }

    /// An answer had so many tokens.
    pub(crate) fn learn_output(&mut self, tokens: usize) {
        self.mean_output = (self.mean_output * 7 + tokens as u64 * 16) / 8;
    }
}

/// All tenants by their numbers.
pub(crate) struct Tenants {
    all: Vec<Option<Tenant>>,
}

impl Tenants {
    /// Tenant 0 alone.
    pub(crate) fn new() -> Tenants {
        Tenants {
            all: vec![Some(Tenant::new(TenantPolicy::default()))],
        }
    }

    pub(crate) fn set(&mut self, now: Micros, id: TenantId, policy: TenantPolicy) {
        if self.all.len() <= id.index() {
            self.all.resize_with(id.index() + 1, || None);
        }
        match &mut self.all[id.index()] {
            Some(tenant) => tenant.set(now, policy),
            absent => *absent = Some(Tenant::new(policy)),
        }
    }

    pub(crate) fn get(&self, id: TenantId) -> Option<&Tenant> {
        self.all.get(id.index())?.as_ref()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (TenantId, &Tenant)> + Clone {
        let numbered = self.all.iter().enumerate();
        numbered.filter_map(|(index, tenant)| Some((TenantId(index as u32), tenant.as_ref()?)))
    }
}

impl Index<TenantId> for Tenants {
    type Output = Tenant;

    fn index(&self, id: TenantId) -> &Tenant {
        self.get(id)
            .unwrap_or_else(|| panic!("{id:?} was never set"))
    }
}

impl IndexMut<TenantId> for Tenants {
    fn index_mut(&mut self, id: TenantId) -> &mut Tenant {
        let tenant = self.all.get_mut(id.index()).and_then(Option::as_mut);
        tenant.unwrap_or_else(|| panic!("{id:?} was never set"))
    }
}
