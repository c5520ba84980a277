// The last minutes of the server, from its metrics: rates from counters, percentiles from
// histograms.

import { gauge, histogram, labelValues, parseMetrics, quantileBetween } from './metrics.js';

/** How long the charts look back, at most and at least. */
const LONGEST_MS = 5 * 60 * 1000;
const SHORTEST_MS = 60 * 1000;
/** Percentiles cover the requests of this time. A shorter one would have too few. */
export const WINDOW_MS = 30 * 1000;

const PERCENTILES = { p50: 0.5, p95: 0.95, p99: 0.99 };
const FIRST_TOKEN = 'vllm:time_to_first_token_seconds';
const TOKEN_GAP = 'vllm:inter_token_latency_seconds';
const TENANT_TOKENS = 'sterna_tenant_tokens_total';
const TENANT_FIRST_TOKEN = 'sterna_tenant_time_to_first_token_seconds';
const PAGE_STATES = ['private', 'tree_pinned', 'tree_cached', 'free'];
const RESPONSES = 'sterna_http_responses_total';
/** A sample of the server that is as close to a point tells nothing new. */
const TOGETHER_MS = 2500;
/** A rate over a shorter time would be mostly chance. */
const SHORTEST_STEP_MS = 1000;

/** The errors of the chart by name, and which statuses each one has. */
export const ERRORS = {
  429: status => status === '429',
  503: status => status === '503',
  'other 4xx': status => status[0] === '4' && status !== '429',
  'other 5xx': status => status[0] === '5' && status !== '503',
};

/** The samples and the points of the charts. */
export class History {
  /** The points, oldest first. */
  points = [];
  #samples = [];

  /**
   * Adds samples that the server has kept, as of `time`. They have no tenants, so the points of an
   * `earlier` history stay, and samples fill what it missed.
   */
  addRecent(time, samples, earlier) {
    for (const { age_ms: ageMs, metrics } of samples) {
      if (ageMs >= SHORTEST_STEP_MS) this.add(time - ageMs, parseMetrics(metrics));
    }
    const seen = (earlier?.points ?? []).filter(point => point.time >= time - LONGEST_MS);
    const isNew = point => !seen.some(other => Math.abs(other.time - point.time) < TOGETHER_MS);
    this.points = [...seen, ...this.points.filter(isNew)].sort((a, b) => a.time - b.time);
  }

  /** Adds the metrics that the server had at `time`, in milliseconds. */
  add(time, series) {
    const last = this.#samples.at(-1);
    // A counter that falls belongs to a server that has started again.
    if (last && countOf(series) < countOf(last.series)) this.#samples = [];
    this.#samples.push({ time, series });
    this.#samples = this.#samples.filter(sample => sample.time >= time - WINDOW_MS);
    this.points.push(this.#point(time, series));
    this.points = this.points.filter(point => point.time >= time - LONGEST_MS);
  }

  /** The time that the charts show. It grows until they look back as far as they can. */
  get spanMs() {
    const age = this.points.at(-1).time - this.points[0].time;
    return Math.max(age, SHORTEST_MS);
  }

  #point(time, series) {
    const perSecond = rateSince(this.#samples.at(-2), time, series);
    const pages = Object.fromEntries(
      PAGE_STATES.map(state => [state, gauge(series, 'sterna_kv_pages', { state })]),
    );
    // The samples that the server has kept have no tenants.
    const known = this.#samples.filter(sample => sample.series.has(TENANT_TOKENS));
    const ofTenant = rateSince(known.at(-2), time, series);
    const tenants = labelValues(series, TENANT_TOKENS, 'tenant').map(tenant =>
      this.#tenant(tenant, series, known[0].series, ofTenant),
    );
    return {
      time,
      pages,
      tenants,
      running: gauge(series, 'vllm:num_requests_running'),
      waiting: gauge(series, 'vllm:num_requests_waiting'),
      kvUsage: gauge(series, 'vllm:kv_cache_usage_perc'),
      generated: perSecond('vllm:generation_tokens_total'),
      prompt: perSecond('vllm:prompt_tokens_total'),
      ended: perSecond('vllm:request_success_total'),
      errors: Object.fromEntries(
        Object.entries(ERRORS).map(([name, isOne]) => [
          name,
          perSecond(RESPONSES, ({ status }) => isOne(status)),
        ]),
      ),
      hitShare: this.#hitShare(series),
      firstToken: percentilesBetween(this.#samples[0].series, series, FIRST_TOKEN),
      tokenGap: percentilesBetween(this.#samples[0].series, series, TOKEN_GAP),
    };
  }

  #tenant(tenant, series, before, perSecond) {
    const one = name => gauge(series, name, { tenant });
    const since = name => one(name) - gauge(before, name, { tenant });
    return {
      tenant,
      running: one('sterna_tenant_requests_running'),
      waiting: one('sterna_tenant_requests_waiting'),
      pages: one('sterna_tenant_kv_pages'),
      generated: perSecond(TENANT_TOKENS, { tenant, kind: 'completion' }),
      firstToken: percentilesBetween(before, series, TENANT_FIRST_TOKEN, { tenant }).p95,
      refused: since('sterna_tenant_refusals_total'),
      total: gauge(series, TENANT_TOKENS, { tenant, kind: 'completion' }),
    };
  }

  // The share of the prompt tokens of the window that came from the prefix cache.
  #hitShare(series) {
    const since = name => gauge(series, name) - gauge(this.#samples[0].series, name);
    const looked = since('vllm:prefix_cache_queries_total');
    return looked > 0 ? since('vllm:prefix_cache_hits_total') / looked : null;
  }
}

function rateSince(previous, time, series) {
  return (name, labels) =>
    previous
      ? (gauge(series, name, labels) - gauge(previous.series, name, labels)) /
        ((time - previous.time) / 1000)
      : null;
}

function percentilesBetween(previous, series, name, labels = {}) {
  const before = histogram(previous, name, labels);
  const after = histogram(series, name, labels);
  const entries = Object.entries(PERCENTILES).map(([label, share]) => [
    label,
    quantileBetween(before, after, share),
  ]);
  return Object.fromEntries(entries);
}

function countOf(series) {
  return gauge(series, 'sterna_engine_steps_total');
}
