//! The number of pages that each tenant holds, and its quota.
//!
//! Invariant: a tenant's `held` is the number of pages that have it as their payer.
//!
//! Invariant: `active_weight` is the sum of the weights of the tenants that hold a page.

use crate::{Page, TenantId};

/// A tenant with at most this many pages is never over its share. So a short prompt stays cached
/// however many tenants there are.
const SHARE_FLOOR: u32 = 4;

/// The pages that a tenant may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageQuota {
    pub(crate) weight: u32,     // At least 1.
    pub(crate) guaranteed: u32, // Pages that the tenant gets whatever others use.
    pub(crate) max: u32,        // Pages that the tenant may hold, including cached pages.
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

/// The payer of each page: the tenant against which it counts. Free and public pages have none.
pub(crate) struct Holdings {
    payers: Vec<Option<TenantId>>, // Indexed by page.
    tenants: Vec<TenantHolding>,
    guaranteed: Vec<TenantId>, // The tenants with a guarantee, in ascending order.
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

    /// Returns the number of tenants.
    pub(crate) fn tenants(&self) -> usize {
        self.tenants.len()
    }

    pub(crate) fn add_tenant(&mut self) {
        self.tenants.push(TenantHolding::default());
    }

    pub(crate) fn set(&mut self, tenant: TenantId, quota: PageQuota) {
        assert!(quota.weight > 0, "the weight of {tenant:?} is 0");
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

    /// Returns the tenants with a guarantee.
    pub(crate) fn guaranteed(&self) -> &[TenantId] {
        &self.guaranteed
    }

    /// Returns whether a tenant holds more than its share: all pages divided by weight among the
    /// tenants that hold a page.
    pub(crate) fn is_over_share(&self, tenant: TenantId) -> bool {
        let held = self.held(tenant);
        let weight = u64::from(self.quota(tenant).weight);
        held > SHARE_FLOOR
            && u64::from(held) > self.payers.len() as u64 * weight / self.active_weight
    }

    pub(crate) fn payer(&self, page: Page) -> Option<TenantId> {
        self.payers[page.index()]
    }

    /// Makes `payer` the payer of `page`.
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
    fn a_share_is_the_weight_among_tenants_that_hold_pages() {
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
        assert!(
            !holdings.is_over_share(light),
            "the share of the only tenant is all pages"
        );
        charge(&mut holdings, 39..40, Some(heavy));
        let weight = |weight| PageQuota {
            weight,
            ..PageQuota::default()
        };
        holdings.set(heavy, weight(3));
        assert!(
            !holdings.is_over_share(light),
            "10 of 40 pages are a quarter"
        );
        charge(&mut holdings, 10..11, Some(light));
        assert!(holdings.is_over_share(light));
        holdings.set(heavy, weight(1000));
        charge(&mut holdings, 4..11, None);
        assert!(
            !holdings.is_over_share(light),
            "few pages are never over the share"
        );
        charge(&mut holdings, 4..5, Some(light));
        assert!(holdings.is_over_share(light));
        charge(&mut holdings, 39..40, None);
        assert!(!holdings.is_over_share(light), "the only tenant again");
        assert_eq!((holdings.held(light), holdings.held(heavy)), (5, 0));
    }
}
