//! A tenant's two rates: requests and tokens.

use super::rate::Meter;
use crate::{Micros, Rate, RateKind, Rates, TenantPolicy};

/// The meters of the rates that a tenant has.
#[derive(Debug, Default)]
pub(crate) struct RateMeters {
    requests: Option<Meter>,
    tokens: Option<Meter>,
}

impl RateMeters {
    pub(super) fn new(policy: &TenantPolicy) -> RateMeters {
        RateMeters {
            requests: policy.requests.map(Meter::new),
            tokens: policy.tokens.map(Meter::new),
        }
    }

    /// Changes the rates. What was used stays used.
    pub(super) fn set(&mut self, now: Micros, policy: &TenantPolicy) {
        let meter = |old: Option<Meter>, rate: Option<Rate>| {
            let rate = rate?;
            Some(old.map_or(Meter::new(rate), |old| old.at_rate(now, rate)))
        };
        self.requests = meter(self.requests, policy.requests);
        self.tokens = meter(self.tokens, policy.tokens);
    }

    /// Returns an error if a rate allows nothing now: which rate recovers last, and when.
    pub(crate) fn conforms(&self, now: Micros) -> Result<(), (RateKind, Micros)> {
        let rates = [
            (RateKind::Requests, &self.requests),
            (RateKind::Tokens, &self.tokens),
        ];
        let exhausted = rates.into_iter().filter_map(|(kind, meter)| {
            let wait = meter.as_ref()?.conforms(now).err()?;
            Some((kind, wait))
        });
        match exhausted.max_by_key(|&(_, wait)| wait) {
            Some(exhausted) => Err(exhausted),
            None => Ok(()),
        }
    }

    /// Charges an accepted request and its uncached prompt tokens.
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

    /// Refunds a request that ended before it ran.
    pub(crate) fn refund_request(&mut self, tokens: u64) {
        if let Some(meter) = &mut self.requests {
            meter.refund(1);
        }
        self.refund_tokens(tokens);
    }

    /// Refunds charged prompt tokens that turned out to be cached.
    pub(crate) fn refund_tokens(&mut self, tokens: u64) {
        if let Some(meter) = &mut self.tokens {
            meter.refund(tokens);
        }
    }

    pub(crate) fn state(&self, now: Micros) -> Rates {
        Rates {
            requests: self.requests.as_ref().map(|meter| meter.state(now)),
            tokens: self.tokens.as_ref().map(|meter| meter.state(now)),
        }
    }
}
