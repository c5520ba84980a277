//! How many pages each tenant holds, and how many it should.
//!
//! Invariant: a tenant holds as many pages as name it as their payer.
//! Invariant: the active weight is the sum of the weights of the tenants that hold a page.

use crate::{Page, TenantId};

/// A tenant is never over its share with so few pages, however many tenants there are: a short prompt stays cached.
const SHARE_FLOOR: u32 = 4;

/// What a tenant may have of all pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageQuota {
    pub(crate) weight: u32,     // At least 1.
    pub(crate) guaranteed: u32, // Pages that others cannot keep from it.
    pub(crate) max: u32,        // Pages that it may hold, cached ones included.
}

impl Default for PageQuota {
    /// Weight 1, no guarantee and no cap.
    fn default() -> PageQuota {
        PageQuota {
            weight: 1,
            guaranteed: 0,
            max: u32::MAX,
        }
    }
}

#[derive(Clone, Default)]
struct TenantHolding {
    quota: PageQuota,
    held: u32,
}

/// Whom each page counts against. Free and public pages count against nobody.
pub(crate) struct Holdings {
    payers: Vec<Option<TenantId>>, // Indexed by page.
    tenants: Vec<TenantHolding>,
    guaranteed: Vec<TenantId>, // Those with a guarantee, in the order of their numbers.
    active_weight: u64,
}

impl Holdings {
    pub(crate) fn new(pages: usize) -> Holdings {
        Holdings {
            payers: vec![None; pages],
            tenants: Vec::new(),
            guaranteed: Vec::new(),
            active_weight: 0,
        }
    }

    /// Tenants that exist: all up to the largest that was ever set.
    pub(crate) fn tenants(&self) -> usize {
        self.tenants.len()
    }

    pub(crate) fn add_tenant(&mut self) {
        self.tenants.push(TenantHolding::default());
    }

    pub(crate) fn set(&mut self, tenant: TenantId, quota: PageQuota) {
        assert!(quota.weight > 0, "{tenant:?} weighs nothing");
        let holding = &mut self.tenants[tenant.index()];
        if holding.held > 0 {
            self.active_weight -= u64::from(holding.quota.weight);
            self.active_weight += u64::from(quota.weight);
        }
        holding.quota = quota;
        self.guaranteed.retain(|&other| other != tenant);
        if quota.guaranteed > 0 {
            let place = self.guaranteed.partition_point(|&other| other < tenant);
            self.guaranteed.insert(place, tenant);
        }
    }

    pub(crate) fn quota(&self, tenant: TenantId) -> PageQuota {
        self.tenants[tenant.index()].quota
    }

    pub(crate) fn held(&self, tenant: TenantId) -> u32 {
        self.tenants[tenant.index()].held
    }

    /// The tenants with a guarantee, and how many pages it is.
    pub(crate) fn guarantees(&self) -> impl Iterator<Item = (TenantId, u32)> + '_ {
        let guaranteed = self.guaranteed.iter();
        guaranteed.map(|&tenant| (tenant, self.quota(tenant).guaranteed))
    }

    /// Whether a tenant holds more than its part, by weight among the tenants that hold any page.
    pub(crate) fn is_over_share(&self, tenant: TenantId) -> bool {
        let held = self.held(tenant);
        let weight = u64::from(self.quota(tenant).weight);
        held > SHARE_FLOOR
            && u64::from(held) > self.payers.len() as u64 * weight / self.active_weight
    }

    pub(crate) fn payer(&self, page: Page) -> Option<TenantId> {
        self.payers[page.index()]
    }

    /// From now on `page` counts against `payer`.
    pub(crate) fn charge(&mut self, page: Page, payer: Option<TenantId>) {
        let before = std::mem::replace(&mut self.payers[page.index()], payer);
        if let Some(tenant) = before {
            let holding = &mut self.tenants[tenant.index()];
            holding.held -= 1;
            if holding.held == 0 {
                self.active_weight -= u64::from(holding.quota.weight);
            }
        }
        if let Some(tenant) = payer {
            let holding = &mut self.tenants[tenant.index()];
            if holding.held == 0 {
                self.active_weight += u64::from(holding.quota.weight);
            }
            holding.held += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_the_weight_among_those_that_hold_pages() {
        let (light, heavy) = (TenantId(0), TenantId(1));
        let mut holdings = Holdings::new(40);
        holdings.add_tenant();
        holdings.add_tenant();
        let charge = |holdings: &mut Holdings, pages: std::ops::Range<u32>, payer| {
            for page in pages {
                holdings.charge(Page::new(page), payer);
            }
        };
        charge(&mut holdings, 0..10, Some(light));
        assert!(!holdings.is_over_share(light), "alone, all is its share");
        charge(&mut holdings, 39..40, Some(heavy));
        let weight = |weight| PageQuota {
            weight,
            ..PageQuota::default()
        };
        holdings.set(heavy, weight(3));
        assert!(!holdings.is_over_share(light), "10 of 40 are a quarter");
        charge(&mut holdings, 10..11, Some(light));
        assert!(holdings.is_over_share(light));
        holdings.set(heavy, weight(1000));
        charge(&mut holdings, 4..11, None);
        assert!(!holdings.is_over_share(light), "the floor holds");
        charge(&mut holdings, 4..5, Some(light));
        assert!(holdings.is_over_share(light));
        charge(&mut holdings, 39..40, None);
        assert!(!holdings.is_over_share(light), "alone again");
        assert_eq!((holdings.held(light), holdings.held(heavy)), (5, 0));
    }
}
