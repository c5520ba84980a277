//! The series that carry a tenant's name. At most [`NAMED`] tenants have series of their own; the rest share `other`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram};
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

use super::{Definition, ENDINGS, REJECTION_REASONS, define};

/// Tenants with series of their own, so that their number is bounded.
const NAMED: usize = 128;

const OTHER: &str = "other";
const TOKEN_KINDS: [&str; 3] = ["prompt", "cached", "completion"];
const WAIT_BUCKETS: &[f64] = &[0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0];

/// A tenant's numbers at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantLoad {
    /// Its sequences that hold pages.
    pub running: u32,
    /// Its sequences that wait.
    pub waiting: u32,
    /// Pages it holds, cached ones included.
    pub pages: u32,
    /// Machine time that it was charged since the start.
    pub service: Duration,
}

/// The handles of one value of the label `tenant`.
pub(super) struct Series {
    pub(super) finished: [Counter; 4],
    pub(super) tokens: [Counter; 3],
    pub(super) rejected: [Counter; 8],
    pub(super) time_to_first_token: Histogram,
    pub(super) whole_time: Histogram,
    pub(super) queue_time: Histogram,
    running: Gauge,
    waiting: Gauge,
    pages: Gauge,
    service: Counter,
}

/// All tenants that were ever named.
pub(super) struct Tenants {
    series: HashMap<u32, Arc<Series>>,
    loads: HashMap<u32, TenantLoad>, // As told last.
    other: Arc<Series>,
    other_service: Duration, // Summed over those who share `other`.
}

impl Tenants {
    /// With the series of `other` and of tenant 0, `default`; call it with the recorder in place.
    pub(super) fn new(all: &mut Vec<Definition>) -> Tenants {
        let other = Arc::new(Series::register(all, OTHER));
        let default = Arc::new(Series::register(&mut Vec::new(), "default"));
        Tenants {
            series: HashMap::from([(0, default)]),
            loads: HashMap::new(),
            other,
            other_service: Duration::ZERO,
        }
    }

    /// Gives tenants that were not known before series of their own, while there is room; call it with the recorder in place.
    pub(super) fn name(&mut self, tenants: &[(u32, String)]) {
        for (id, name) in tenants {
            if !self.series.contains_key(id) && self.series.len() < NAMED {
                let series = Series::register(&mut Vec::new(), name);
                self.series.insert(*id, Arc::new(series));
            }
        }
    }

    pub(super) fn of(&self, id: u32) -> &Series {
        self.series.get(&id).unwrap_or(&self.other)
    }

    /// Changes the series by as much as the tenant's numbers have changed, so that those who share series add up.
    pub(super) fn load(&mut self, id: u32, now: TenantLoad) {
        let before = self.loads.insert(id, now).unwrap_or_default();
        let series = self.series.get(&id);
        let total = match series {
            Some(_) => now.service,
            None => {
                self.other_service += now.service.saturating_sub(before.service);
                self.other_service
            }
        };
        let series = series.unwrap_or(&self.other);
        let change = |now: u32, before: u32| f64::from(now) - f64::from(before);
        series
            .running
            .increment(change(now.running, before.running));
        series
            .waiting
            .increment(change(now.waiting, before.waiting));
        series.pages.increment(change(now.pages, before.pages));
        series.service.absolute(total.as_secs());
    }

    /// The engine has ended: nobody runs, waits or holds anything.
    pub(super) fn clear(&mut self) {
        let known: Vec<(u32, TenantLoad)> =
            self.loads.iter().map(|(&id, &load)| (id, load)).collect();
        for (id, TenantLoad { service, .. }) in known {
            self.load(
                id,
                TenantLoad {
                    service,
                    ..TenantLoad::default()
                },
            );
        }
    }
}

impl Series {
    #[rustfmt::skip] // One metric, one line, so that the list reads as a table.
    fn register(all: &mut Vec<Definition>, tenant: &str) -> Series {
        Series {
            finished: counters(all, "sterna_tenant_requests_total", "A tenant's requests that ended, by reason.", tenant, "finished_reason", ENDINGS),
            tokens: counters(all, "sterna_tenant_tokens_total", "A tenant's tokens: of prompts, those of them found in the cache, and generated.", tenant, "kind", TOKEN_KINDS),
            rejected: counters(all, "sterna_tenant_refusals_total", "A tenant's requests turned away, by reason.", tenant, "reason", REJECTION_REASONS),
            time_to_first_token: latency(all, "sterna_tenant_time_to_first_token_seconds", "From arrival to the first token, by tenant.", tenant),
            whole_time: latency(all, "sterna_tenant_request_seconds", "From arrival to the end, by tenant.", tenant),
            queue_time: latency(all, "sterna_tenant_queue_seconds", "From arrival to the first admission, by tenant.", tenant),
            running: tenant_gauge(all, "sterna_tenant_requests_running", "A tenant's sequences in the running batch.", tenant),
            waiting: tenant_gauge(all, "sterna_tenant_requests_waiting", "A tenant's sequences waiting to run.", tenant),
            pages: tenant_gauge(all, "sterna_tenant_kv_pages", "KV pages that a tenant holds, cached ones included.", tenant),
            service: service(all, tenant),
        }
    }
}

fn service(all: &mut Vec<Definition>, tenant: &str) -> Counter {
    let name = "sterna_tenant_service_seconds_total";
    define(all, name, None);
    describe_counter!(name, "Machine time charged to a tenant, in whole seconds.");
    counter!(name, "tenant" => tenant.to_owned())
}

fn tenant_gauge(
    all: &mut Vec<Definition>,
    name: &'static str,
    help: &'static str,
    tenant: &str,
) -> Gauge {
    define(all, name, None);
    describe_gauge!(name, help);
    gauge!(name, "tenant" => tenant.to_owned())
}

fn latency(
    all: &mut Vec<Definition>,
    name: &'static str,
    help: &'static str,
    tenant: &str,
) -> Histogram {
    define(all, name, Some(WAIT_BUCKETS));
    describe_histogram!(name, help);
    histogram!(name, "tenant" => tenant.to_owned())
}

fn counters<const N: usize>(
    all: &mut Vec<Definition>,
    name: &'static str,
    help: &'static str,
    tenant: &str,
    label: &'static str,
    values: [&'static str; N],
) -> [Counter; N] {
    define(all, name, None);
    describe_counter!(name, help);
    values.map(|value| counter!(name, "tenant" => tenant.to_owned(), label => value))
}
