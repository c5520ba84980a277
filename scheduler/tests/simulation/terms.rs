//! What a world is like: its policy, its costs, and its tenants' terms.

use sterna_scheduler::{
    Band, Budget, CostModel, Growth, Micros, Order, PAGE_TOKENS, Policy, PublicPrefix, Rate,
    TenantId, TenantPolicy,
};

use crate::model::Rng;
use crate::world::World;

impl World {
    /// Gives every tenant terms, other ones than before.
    pub(crate) fn set_tenants(&mut self) {
        let reserved: usize = self
            .public
            .iter()
            .map(|prefix| prefix.len() / PAGE_TOKENS)
            .sum();
        let pages = self.limits.pages - reserved as u32;
        let all = self.public.len() as u32;
        let rng = &mut self.rng;
        let terms = (0..self.tenants).map(|_| {
            let is_capped = rng.percent(30);
            let max_pages = if is_capped {
                rng.between(1, u64::from(pages)) as u32
            } else {
                u32::MAX
            };
            let rate = |rng: &mut Rng| {
                rng.percent(15).then(|| Rate {
                    per_minute: rng.between(60_000, 6_000_000) as u32,
                    burst: rng.between(1, 100) as u32,
                })
            };
            TenantPolicy {
                band: *rng.pick(&[
                    Band::Interactive,
                    Band::Standard,
                    Band::Standard,
                    Band::Batch,
                ]),
                weight: rng.between(1, 4) as u32,
                requests: rate(rng),
                tokens: rate(rng),
                max_running: *rng.pick(&[1, 2, u32::MAX, u32::MAX]),
                max_queued: *rng.pick(&[1, 4, u32::MAX]),
                max_queued_time: *rng.pick(&[20_000, Micros::MAX, Micros::MAX]),
                guaranteed_pages: rng
                    .below(u64::from(pages / 4).max(1))
                    .min(u64::from(max_pages)) as u32,
                max_pages,
                public: (0..all)
                    .filter(|_| rng.percent(70))
                    .map(PublicPrefix)
                    .collect(),
            }
        });
        self.terms = terms.collect();
        self.accounts.iter_mut().for_each(|account| {
            account.accepted = 0;
            account.since = self.now;
        });
        let numbered: Vec<_> = (0..)
            .map(TenantId)
            .zip(self.terms.iter().cloned())
            .collect();
        self.scheduler
            .set_tenants(&numbered)
            .expect("the terms are possible");
        self.scheduler.check();
    }
}

pub(crate) fn random_policy(rng: &mut Rng) -> Policy {
    let time = |rng: &mut Rng| {
        let least = rng.between(100, 1000);
        Budget::Time {
            inter_token_target: rng.between(1000, 20_000),
            least,
            most: rng.between(least, 20_000),
        }
    };
    Policy {
        order: match rng.below(6) {
            0 => Order::FirstCome,
            1 => Order::LongestPrefix,
            2 => Order::FairShare { slack: 0 },
            _ => Order::FairShare {
                slack: rng.between(1, 20_000),
            },
        },
        budget: match rng.below(6) {
            0 => Budget::Tokens(rng.between(1, 96) as u32),
            1 => Budget::PrefillFirst,
            _ => time(rng),
        },
        growth: *rng.pick(&[
            Growth::Least,
            Growth::Least,
            Growth::Least,
            Growth::Expected,
            Growth::Most,
        ]),
        max_draft: *rng.pick(&[0, 2, 6]),
    }
}

pub(crate) fn random_cost(rng: &mut Rng) -> CostModel {
    CostModel {
        rows: CostModel::roofline(rng.between(1, 4_000_000), rng.between(1_000, 400_000)),
        kilo_decode_keys: rng.between(0, 400_000),
        kilo_chunk_keys: rng.between(0, 400_000),
        head: rng.between(0, 1_000_000),
        logit: rng.between(0, 100_000),
    }
}
