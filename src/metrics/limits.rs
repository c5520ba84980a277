//! The limits of tenants as gauges, so that dashboards can draw them beside what the tenants use.
//!
//! Invariant: a tenant without a limit has no series for it.

use sterna_scheduler::{Rate, TenantPolicy};

use super::sampled::SampledMetric;

/// A limit that a tenant may have.
pub(super) struct TenantLimit {
    pub(super) metric: SampledMetric,
    of: fn(&TenantPolicy) -> Option<u32>,
}

impl TenantLimit {
    /// Returns the limit of a tenant, if it has one.
    pub(super) fn of(&self, policy: &TenantPolicy) -> Option<f64> {
        (self.of)(policy).map(f64::from)
    }
}

pub(super) const TENANT_LIMITS: [TenantLimit; 6] = [
    TenantLimit {
        metric: SampledMetric::gauge(
            "sterna_tenant_max_running_sequences",
            "The most sequences of a tenant in the running batch.",
        ),
        of: |policy| bounded(policy.max_running),
    },
    TenantLimit {
        metric: SampledMetric::gauge(
            "sterna_tenant_max_queued_requests",
            "The most waiting requests of a tenant.",
        ),
        of: |policy| bounded(policy.max_queued),
    },
    TenantLimit {
        metric: SampledMetric::gauge(
            "sterna_tenant_max_kv_pages",
            "The most KV pages of a tenant, cached ones included.",
        ),
        of: |policy| bounded(policy.max_pages),
    },
    TenantLimit {
        metric: SampledMetric::gauge(
            "sterna_tenant_guaranteed_kv_pages",
            "The KV pages that a tenant gets whatever others use.",
        ),
        of: |policy| Some(policy.guaranteed_pages).filter(|&pages| pages > 0),
    },
    TenantLimit {
        metric: SampledMetric::gauge(
            "sterna_tenant_max_requests_per_minute",
            "The rate of requests that a tenant may keep up.",
        ),
        of: |policy| per_minute(policy.requests),
    },
    TenantLimit {
        metric: SampledMetric::gauge(
            "sterna_tenant_max_tokens_per_minute",
            "The rate of output tokens and uncached prompt tokens that a tenant may keep up.",
        ),
        of: |policy| per_minute(policy.tokens),
    },
];

/// Returns a limit, unless it is the largest number, which means that there is none.
fn bounded(limit: u32) -> Option<u32> {
    Some(limit).filter(|&limit| limit < u32::MAX)
}

fn per_minute(rate: Option<Rate>) -> Option<u32> {
    rate.map(|rate| rate.per_minute)
}
