//! The metrics of one engine, and the only functions that record them.
//!
//! A metric that vLLM has too carries vLLM's name; the others begin with `sterna_`. Times are in
//! seconds, names of counters end in `_total`, label values come from closed sets. Each `Metrics`
//! has its own registry, so that one process can have several.
//!
//! Invariant: every series exists from the start, except the series of tenants that are named
//! later, of limits that a tenant does not have, and of routes that have not answered yet.
//!
//! Invariant: every series starts at zero. The exceptions are the two info gauges, which are 1, and
//! the series of the process, which have their values.

mod labels;
mod limits;
mod recent;
mod registry;
mod responses;
mod sampled;
mod series;
mod tenant;
mod timeline;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metrics::NoopRecorder;
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use sterna_scheduler::{
    Budget, CostModel, FinishReason, Limits, Snapshot, TenantId, TenantPolicy, TenantState,
};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};

use labels::finished_reason;
use limits::TENANT_LIMITS;
use recent::RecentMetrics;
use registry::{Definition, Registry};
use responses::ResponseSeries;
use sampled::{GRAMMAR_TIMES, SERVICE, TextWriter};
use series::EngineSeries;
use tenant::AllTenantSeries;

pub use labels::{Identity, RejectionReason};
pub use recent::RecentSample;
pub use sampled::GrammarFigures;
pub use timeline::Timeline;

/// The durations of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepTimes {
    /// The number of computed tokens.
    pub tokens: usize,
    /// The prediction of `computing`.
    pub predicted: Duration,
    /// The same prediction at the machine's speed at start.
    pub calibrated: Duration,
    /// From the beginning of the engine thread's turn to the drawn tokens.
    pub whole: Duration,
    /// Forward pass and draws.
    pub computing: Duration,
    /// Plan and commit.
    pub deciding: Duration,
    /// Everything except the forward pass: commands, plan, draws, commit, and publishing the
    /// previous step.
    pub overhead: Duration,
}

/// All series of one engine. Clones share them.
#[derive(Clone)]
pub struct Metrics {
    series: Arc<EngineSeries>,
    tenants: Arc<Mutex<AllTenantSeries>>,
    responses: Arc<Mutex<ResponseSeries>>,
    grammars: Arc<Mutex<GrammarFigures>>, // As last reported.
    recent: Arc<Mutex<RecentMetrics>>,
    recorder: Arc<PrometheusRecorder>, // To register more tenants and routes.
    exporter: PrometheusHandle,
    model_name: Arc<str>,
}

impl Metrics {
    /// Returns a new registry with all series at their first value.
    pub fn new(identity: &Identity) -> Metrics {
        let mut builder = PrometheusBuilder::new()
            .add_global_label("model_name", &identity.model_name)
            .add_global_label("engine", "0");
        for definition in definitions() {
            if let Some(buckets) = definition.buckets {
                builder = builder
                    .set_buckets_for_metric(Matcher::Full(definition.name.to_owned()), buckets)
                    .expect("every histogram has buckets");
            }
        }
        let recorder = builder.build_recorder();
        let exporter = recorder.handle();
        let (series, tenants, responses) = metrics::with_local_recorder(&recorder, || {
            let registry = &mut Registry::default();
            let series = EngineSeries::register(registry, identity);
            let responses = ResponseSeries::register(registry);
            (series, AllTenantSeries::register().0, responses)
        });
        Metrics {
            series: Arc::new(series),
            tenants: Arc::new(Mutex::new(tenants)),
            responses: Arc::new(Mutex::new(responses)),
            grammars: Arc::default(),
            recent: Arc::default(),
            model_name: identity.model_name.as_str().into(),
            recorder: Arc::new(recorder),
            exporter,
        }
    }

    /// Names tenants, and replaces the limits of all tenants. The first 128 tenants get their own
    /// series; the others share the label `other`. Tenant 0 is called `default`. No tenant is ever
    /// renamed or removed.
    pub fn set_tenants(
        &self,
        tenants: &[(TenantId, String)],
        policies: Vec<(TenantId, TenantPolicy)>,
    ) {
        let mut all = self.tenants();
        metrics::with_local_recorder(&*self.recorder, || all.name(tenants));
        all.limit(policies);
    }

    /// Records the limits of the server.
    pub fn limits(&self, limits: &Limits, budget: &Budget) {
        let series = &self.series.limits;
        series.running.set(limits.max_running);
        series.queued.set(limits.max_queued);
        let queued_time = Duration::from_micros(limits.max_queued_time);
        series.queued_time.set(queued_time.as_secs_f64());
        if let Budget::Time {
            inter_token_target, ..
        } = *budget
        {
            let target = Duration::from_micros(inter_token_target);
            series.inter_token_target.set(target.as_secs_f64());
        }
    }

    /// Records what grammars have taken and take.
    pub fn grammars(&self, now: GrammarFigures) {
        let grammars = self.grammars.lock();
        *grammars.unwrap_or_else(PoisonError::into_inner) = now;
    }

    /// Records a tenant's state.
    pub fn tenant(&self, id: TenantId, now: TenantState) {
        self.tenants().set(id, now);
    }

    /// Locks the tenants' series. A thread that panicked with the lock left them valid, because
    /// each value is set at once.
    fn tenants(&self) -> MutexGuard<'_, AllTenantSeries> {
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all series in Prometheus's text format.
    pub fn render(&self) -> String {
        let mut writer = TextWriter::new(self.exporter.render(), &self.model_name);
        let tenants = self.tenants();
        writer.by_tenant(&SERVICE, tenants.services());
        for limit in &TENANT_LIMITS {
            writer.by_tenant(&limit.metric, tenants.limits(limit));
        }
        let grammars = self.grammars.lock();
        let grammars = grammars.unwrap_or_else(PoisonError::into_inner);
        writer.grammars(grammars.values);
        for (kind, metric) in GRAMMAR_TIMES.iter().enumerate() {
            let times = grammars.times.iter();
            let seconds = times.map(|(id, times)| (*id, times[kind].as_secs_f64()));
            writer.by_tenant(metric, tenants.by_name(seconds).into_iter());
        }
        drop(grammars);
        drop(tenants);
        writer.process();
        writer.finish()
    }

    /// Keeps the charted series every few seconds, without an end.
    pub async fn keep_recent(self) {
        let mut ticks = interval(recent::INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            // With many tenants, the text is long. Streams must not wait for it.
            let (metrics, now) = (self.clone(), Instant::now());
            if spawn_blocking(move || metrics.keep_sample(now))
                .await
                .is_err()
            {
                return; // The runtime ends.
            }
        }
    }

    /// Keeps the series that the page's charts show, as a sample of the moment `at`.
    pub fn keep_sample(&self, at: Instant) {
        let text = self.exporter.render();
        self.recent_metrics().keep(at, &text);
    }

    /// Returns the samples of the last minutes, oldest first.
    pub fn recent_samples(&self, now: Instant) -> Vec<RecentSample> {
        self.recent_metrics().samples(now)
    }

    fn recent_metrics(&self) -> MutexGuard<'_, RecentMetrics> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Folds recorded samples into their buckets. Call it, or `render`, every few seconds, because
    /// histograms grow until then.
    pub fn run_upkeep(&self) {
        self.exporter.run_upkeep();
    }

    /// Records the scheduler's gauges and totals.
    pub fn snapshot(&self, now: &Snapshot) {
        let load = &self.series.load;
        load.running.set(now.running as f64);
        load.waiting.set(now.queued as f64);
        let queued_time = Duration::from_micros(now.queued_time);
        load.queued_time.set(queued_time.as_secs_f64());
        let pages = [now.free, now.private, now.pinned, now.tree - now.pinned];
        for (gauge, pages) in load.pages.iter().zip(pages) {
            gauge.set(pages as f64);
        }
        let slabs = [now.slabs.free, now.slabs.owned, now.slabs.cached];
        for (gauge, slabs) in load.slabs.iter().zip(slabs) {
            gauge.set(slabs as f64);
        }
        let (used, all) = (now.private + now.pinned, now.free + now.private + now.tree);
        load.kv_usage.set(used as f64 / all.max(1) as f64);
        let totals = &self.series.totals;
        totals.prefix_queries.absolute(now.prefix_queries);
        totals.prefix_hits.absolute(now.prefix_hits);
        totals.preemptions.absolute(now.preemptions);
        totals.evictions.absolute(now.evictions);
        totals.state_evictions.absolute(now.slabs.evictions);
        totals.page_copies.absolute(now.copies);
        totals.drafted.absolute(now.drafted);
        totals.accepted.absolute(now.accepted);
        totals.own_drafted.absolute(now.own_drafted);
        totals.own_accepted.absolute(now.own_accepted);
        totals.block_passes.absolute(now.block_passes);
        totals.unmasked.absolute(now.unmasked);
    }

    /// Records how the model has used its experts since it was loaded.
    pub fn experts(&self, rows: u64, hits: u64, candidates: u64, rows_at_largest_load: u64) {
        let experts = &self.series.experts;
        experts.rows.absolute(rows);
        experts.hits.absolute(hits);
        experts.candidates.absolute(candidates);
        let at_largest_load = &experts.rows_at_largest_load;
        at_largest_load.absolute(rows_at_largest_load);
    }

    /// Records the cost of a step, as measured at start.
    pub fn calibrated(&self, cost: &CostModel) {
        let keys_and_head = [
            cost.kilo_decode_keys,
            cost.kilo_chunk_keys,
            cost.head,
            cost.logit,
        ];
        let parts = cost.rows.iter().chain(&keys_and_head);
        for (gauge, &part) in self.series.steps.cost.iter().zip(parts) {
            gauge.set(Duration::from_nanos(part).as_secs_f64());
        }
    }

    /// Sets the gauges of load and tenants to 0, because the engine has ended. The info gauges, the
    /// limits and the cost of a step stay.
    pub fn ended(&self) {
        self.snapshot(&Snapshot::default());
        self.tenants().clear();
    }

    /// Records a step.
    pub fn step(&self, step: &StepTimes) {
        let steps = &self.series.steps;
        steps.count.increment(1);
        steps.time.record(step.whole);
        steps.calibrated_time.record(step.calibrated);
        steps.tokens.record(step.tokens as f64);
        steps.decision_time.record(step.deciding);
        steps.overhead.record(step.overhead);
        if !step.predicted.is_zero() {
            let ratio = step.computing.as_secs_f64() / step.predicted.as_secs_f64();
            steps.prediction_ratio.record(ratio);
        }
    }

    /// Records that the scheduler admitted the request for the first time.
    pub fn admitted(&self, timeline: &mut Timeline, at: Instant) {
        timeline.admitted = Some(at);
        let waited = timeline.since_arrival(at);
        self.series.latencies.queue.record(waited);
        self.tenants().of(timeline.tenant).queue.record(waited);
    }

    /// Records the next token of a request. All tokens of one step have the same moment, so the
    /// gaps between them are 0, as the client sees them.
    pub fn token(&self, timeline: &mut Timeline, at: Instant) {
        match timeline.last_token {
            Some(last) => {
                let gap = at.saturating_duration_since(last);
                self.series.latencies.token_gap.record(gap);
            }
            None => self.first_token(timeline, at),
        }
        timeline.last_token = Some(at);
        timeline.generated_tokens += 1;
        self.series.requests.generation_tokens.increment(1);
    }

    /// Records that the embedding of a prompt is complete. It counts as a first token and as no
    /// generated one.
    pub fn embedded(&self, timeline: &mut Timeline, at: Instant) {
        self.first_token(timeline, at);
    }

    fn first_token(&self, timeline: &mut Timeline, at: Instant) {
        timeline.first_token = Some(at);
        let prompt_tokens = u64::from(timeline.prompt_tokens);
        self.series.requests.prompt_tokens.increment(prompt_tokens);
        let latencies = &self.series.latencies;
        let waited = timeline.since_arrival(at);
        latencies.time_to_first_token.record(waited);
        let tenants = self.tenants();
        let of_tenant = tenants.of(timeline.tenant);
        of_tenant.time_to_first_token.record(waited);
        if let Some(prefill) = timeline.service_time(at) {
            latencies.prefill.record(prefill);
        }
    }

    /// Records the end of a request.
    pub fn finished(
        &self,
        timeline: &Timeline,
        reason: FinishReason,
        cached_tokens: u32,
        at: Instant,
    ) {
        let requests = &self.series.requests;
        let whole = timeline.since_arrival(at);
        requests.finished[finished_reason(reason)].increment(1);
        self.series.latencies.whole.record(whole);
        let (prompt, generated) = (timeline.prompt_tokens, timeline.generated_tokens);
        requests.prompt_length.record(f64::from(prompt));
        requests.generation_length.record(f64::from(generated));
        self.token_latencies(timeline);
        let tenants = self.tenants();
        let of_tenant = tenants.of(timeline.tenant);
        of_tenant.finished[finished_reason(reason)].increment(1);
        of_tenant.whole.record(whole);
        if timeline.admitted.is_some() {
            let tokens = [prompt, cached_tokens, generated];
            for (counter, tokens) in of_tenant.tokens.iter().zip(tokens) {
                counter.increment(u64::from(tokens));
            }
        }
    }

    /// Records the latencies of a request that had a token.
    fn token_latencies(&self, timeline: &Timeline) {
        let (Some(first), Some(last)) = (timeline.first_token, timeline.last_token) else {
            return;
        };
        let latencies = &self.series.latencies;
        let decode = last.saturating_duration_since(first);
        latencies.decode.record(decode);
        if timeline.generated_tokens > 1 {
            let gaps = timeline.generated_tokens - 1;
            latencies.time_per_token.record(decode / gaps);
        }
        if let Some(inference) = timeline.service_time(last) {
            latencies.inference.record(inference);
        }
    }

    /// Records that a tenant's request was rejected.
    pub fn rejected(&self, tenant: TenantId, reason: RejectionReason) {
        self.series.requests.rejected[reason as usize].increment(1);
        self.tenants().of(tenant).rejected[reason as usize].increment(1);
    }

    /// Records a response. `route` is the path of its endpoint, if it has one.
    pub fn responded(&self, route: Option<&str>, status: u16) {
        let lock = self.responses.lock();
        let mut responses = lock.unwrap_or_else(PoisonError::into_inner);
        metrics::with_local_recorder(&*self.recorder, || {
            responses.of(route, status).increment(1);
        });
    }

    /// Records that a client left before its answer was complete.
    pub fn client_disconnected(&self) {
        self.series.requests.disconnects.increment(1);
    }
}

/// Returns the name of every metric.
pub fn names() -> Vec<&'static str> {
    let definitions = definitions();
    definitions.iter().map(|metric| metric.name).collect()
}

/// Returns all metrics without a registry, since a recorder needs the buckets before it exists.
fn definitions() -> Vec<Definition> {
    metrics::with_local_recorder(&NoopRecorder, || {
        let mut registry = Registry::default();
        EngineSeries::register(&mut registry, &Identity::default());
        ResponseSeries::register(&mut registry);
        registry.definitions.extend(AllTenantSeries::register().1);
        registry.definitions.extend(sampled::definitions());
        let limits = TENANT_LIMITS.iter().map(|limit| limit.metric.definition());
        registry.definitions.extend(limits);
        registry.definitions
    })
}

#[cfg(test)]
mod tests;
