//! The random policy, cost model and tenants of a world.

use sterna_random::Random;
use sterna_scheduler::{
    Band, Budget, CostModel, Growth, Micros, Order, OwnDrafts, PAGE_TOKENS, Policy, PublicPrefix,
    Rate, SAMPLING_UNIT, TenantId, TenantPolicy, TokenId,
};

use crate::world::World;

impl World {
    /// Gives every tenant a new random policy.
    pub(crate) fn set_tenants(&mut self) {
        let reserved: usize = self
            .public
            .iter()
            .map(|prefix| prefix.len() / PAGE_TOKENS)
            .sum();
        let pages = self.limits.pages - reserved as u32;
        let prefixes = self.public.len() as u32;
        let random = &mut self.random;
        self.terms = (0..self.tenants)
            .map(|index| {
                // At most all pages together: there are at most four tenants.
                let most_guaranteed = if index == 0 { pages / 2 } else { pages / 6 };
                random_tenant(random, pages, most_guaranteed, prefixes)
            })
            .collect();
        for account in &mut self.accounts {
            account.accepted = 0;
            account.tokens = 0;
            account.since = self.now;
        }
        self.policies += 1;
        let numbered: Vec<_> = (0..)
            .map(TenantId)
            .zip(self.terms.iter().cloned())
            .collect();
        self.scheduler
            .set_tenants(&numbered)
            .expect("the policies are valid");
        self.scheduler.check();
    }
}

fn random_tenant(
    random: &mut Random,
    pages: u32,
    most_guaranteed: u32,
    prefixes: u32,
) -> TenantPolicy {
    let is_capped = random.percent(30);
    let max_pages = if is_capped {
        random.between(1, u64::from(pages)) as u32
    } else {
        u32::MAX
    };
    let rate = |random: &mut Random, least: u64| {
        random.percent(15).then(|| Rate {
            per_minute: random.between(least, 100 * least) as u32,
            burst: random.between(1, 100) as u32,
        })
    };
    let guaranteed = if random.percent(50) {
        random.between(0, u64::from(most_guaranteed))
    } else {
        0
    };
    TenantPolicy {
        band: random.pick(&[
            Band::Interactive,
            Band::Standard,
            Band::Standard,
            Band::Batch,
        ]),
        weight: random.between(1, 4) as u32,
        requests: rate(random, 60_000),
        tokens: rate(random, 3_000),
        max_running: random.pick(&[1, 2, u32::MAX, u32::MAX]),
        max_queued: random.pick(&[1, 4, u32::MAX]),
        max_queued_time: random.pick(&[20_000, Micros::MAX, Micros::MAX]),
        guaranteed_pages: guaranteed.min(u64::from(max_pages)) as u32,
        max_pages,
        public: (0..prefixes)
            .filter(|_| random.percent(70))
            .map(PublicPrefix)
            .collect(),
    }
}

pub(crate) fn random_policy(random: &mut Random) -> Policy {
    let time = |random: &mut Random| {
        let min_step = random.between(100, 1000);
        Budget::Time {
            inter_token_target: random.between(1000, 20_000),
            min_step,
            max_step: random.between(min_step, 20_000),
            is_strict: min_step.is_multiple_of(3),
        }
    };
    Policy {
        order: match random.below(6) {
            0 => Order::FirstCome,
            1 => Order::LongestPrefix,
            2 => Order::FairShare { slack: 0 },
            _ => Order::FairShare {
                slack: random.between(1, 20_000),
            },
        },
        budget: match random.below(6) {
            0 => Budget::Tokens(random.between(1, 96) as u32),
            1 => Budget::PrefillFirst,
            _ => time(random),
        },
        growth: random.pick(&[
            Growth::Minimal,
            Growth::Minimal,
            Growth::Minimal,
            Growth::Expected,
            Growth::Maximal,
        ]),
        max_draft: random.pick(&[0, 2, 6]),
        own_drafts: random
            .pick(&[None, None, Some(4), Some(16)])
            .map(|block| OwnDrafts {
                mask_token: MASK_TOKEN,
                block,
            }),
    }
}

/// A token that no client has.
const MASK_TOKEN: TokenId = 1 << 30;

pub(crate) fn random_cost(random: &mut Random) -> CostModel {
    CostModel {
        rows: CostModel::roofline(random.between(1, 4_000_000), random.between(1_000, 400_000)),
        kilo_decode_keys: random.between(0, 400_000),
        kilo_chunk_keys: random.between(0, 400_000),
        head: random.between(0, 1_000_000),
        logit: random.between(0, 100_000),
        sampling: random.between(0, 2 * SAMPLING_UNIT),
    }
}
