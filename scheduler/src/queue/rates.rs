//! A tenant's two rate limits, requests and tokens, and what its requests reserve of them.

use crate::meter::Meter;
use crate::{Micros, Rate, RateKind, Rates, TenantPolicy};

/// What a sequence has reserved of its tenant's rates.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RateReservation {
    request: bool,          // Only the first choice counts as a request.
    pub(crate) prompt: u64, // The uncached prompt tokens; 0 for a further choice of a prompt.
    output: u64,            // The greatest number of output tokens.
    unlikely: u64,          // How many of them will probably be refunded.
    meter: u32,             // The token meter that was charged: see `RateMeters`.
}

/// The meters of the rates that a tenant has.
///
/// Invariant: an accepted request has paid for all tokens that it can use until it ends. So a
/// tenant is never in debt by more than one request, and `conforms` never promises too much.
#[derive(Debug, Default)]
pub(crate) struct RateMeters {
    requests: Option<Meter>,
    tokens: Option<Meter>,
    token_meter: u32, // Counts the token meters, so that no other one gets a refund.
    unlikely: u64,    // Tokens that the token meter will probably refund.
}

impl RateMeters {
    pub(super) fn new(policy: &TenantPolicy) -> RateMeters {
        RateMeters {
            requests: policy.requests.map(Meter::new),
            tokens: policy.tokens.map(Meter::new),
            token_meter: 0,
            unlikely: 0,
        }
    }

    /// Changes the rates. What was used stays used.
    pub(super) fn set(&mut self, now: Micros, policy: &TenantPolicy) {
        let meter = |old: Option<Meter>, rate: Option<Rate>| {
            let rate = rate?;
            Some(old.map_or(Meter::new(rate), |old| old.at_rate(now, rate)))
        };
        if self.tokens.is_none() {
            self.token_meter += 1;
            self.unlikely = 0;
        }
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

    /// Returns `Ok` if the rates allow a request now. Otherwise returns which rate recovers last,
    /// and when that is likely: the outputs that are reserved end after `answer_time` at the
    /// earliest, with their usual lengths.
    pub(crate) fn likely_conforms(
        &self,
        now: Micros,
        answer_time: impl Fn() -> Micros,
    ) -> Result<(), (RateKind, Micros)> {
        let (kind, wait) = match self.conforms(now) {
            Err((RateKind::Tokens, wait)) => (RateKind::Tokens, wait),
            other => return other,
        };
        let of_requests = self.requests.as_ref().map(|meter| meter.conforms(now));
        let of_requests = of_requests.and_then(Result::err).unwrap_or(0);
        let tokens = self.tokens.as_ref();
        let refunded = tokens.map_or(0, |meter| meter.wait_with_refund(now, self.unlikely));
        let likely = refunded.max(answer_time()).max(of_requests);
        Err((kind, wait.min(likely)))
    }

    /// Charges a request, and no tokens.
    pub(crate) fn charge_request(&mut self, now: Micros) {
        if let Some(meter) = &mut self.requests {
            meter.charge(now, 1);
        }
    }

    /// Charges a choice of an accepted request: its output, for the first choice of a prompt also
    /// the uncached tokens of the prompt, and for the first choice of all the request. The output
    /// has at most `output` tokens, and probably `expected`.
    pub(crate) fn reserve(
        &mut self,
        now: Micros,
        is_first: bool,
        prompt: Option<u64>,
        [output, expected]: [u64; 2],
    ) -> RateReservation {
        if is_first {
            self.charge_request(now);
        }
        let reserved = RateReservation {
            request: is_first,
            prompt: prompt.unwrap_or(0),
            output,
            unlikely: output.saturating_sub(expected),
            meter: self.token_meter,
        };
        self.unlikely += reserved.unlikely;
        if let Some(meter) = &mut self.tokens {
            meter.charge(now, reserved.prompt + reserved.output);
        }
        reserved
    }

    /// Refunds what a sequence did not use when it ends: everything if it never ran.
    pub(crate) fn settle(&mut self, reserved: &RateReservation, has_run: bool, output: u64) {
        let unused = reserved.output - output;
        if reserved.meter == self.token_meter {
            self.unlikely -= reserved.unlikely;
        }
        if has_run {
            return self.refund_tokens(reserved, unused);
        }
        if let Some(meter) = self.requests.as_mut().filter(|_| reserved.request) {
            meter.refund(1);
        }
        self.refund_tokens(reserved, reserved.prompt + unused);
    }

    /// Refunds reserved tokens, such as prompt tokens that turned out to be cached.
    pub(crate) fn refund_tokens(&mut self, reserved: &RateReservation, tokens: u64) {
        if let Some(meter) = &mut self.tokens
            && reserved.meter == self.token_meter
        {
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
