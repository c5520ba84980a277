// The view of the live server: its figures, its charts and its tenants.

import { fetchMetrics, fetchRecentMetrics } from '../api/requests.js';
import { byId, element } from '../elements/element.js';
import { count, duration, rate } from '../elements/numbers.js';
import { adminKey, setAdminKey } from '../settings/settings.js';
import { Chart, sparkline } from './chart.js';
import { ERRORS, History, WINDOW_MS } from './history.js';
import { parseMetrics } from './metrics.js';

const EACH_MS = 2000;

const seconds = value => duration(value * 1000);
const share = value => `${Math.round(value * 100)} %`;
const shorten = value =>
  value >= 1000 ? `${Number((value / 1000).toPrecision(2))}k` : `${Number(value.toFixed(2))}`;

function percentileText(quantile) {
  if (!quantile) return '–';
  return quantile.isBelow ? `< ${seconds(quantile.value)}` : seconds(quantile.value);
}

function percentiles(field) {
  return ['p50', 'p95', 'p99'].map(label => ({
    label,
    value: point => point[field][label]?.value ?? null,
    text: point => percentileText(point[field][label]),
  }));
}

function makeCharts() {
  const charts = [
    {
      title: 'Tokens a second',
      format: rate,
      axis: shorten,
      isFilled: true,
      series: [
        { label: 'generated', value: point => point.generated },
        { label: 'prompt', value: point => point.prompt },
      ],
    },
    {
      title: 'Requests at once',
      format: count,
      axis: shorten,
      isFilled: true,
      series: [
        { label: 'running', value: point => point.running },
        { label: 'waiting', value: point => point.waiting },
      ],
    },
    {
      title: 'Time to first token',
      format: seconds,
      axis: secondsOfAxis,
      series: percentiles('firstToken'),
    },
    {
      title: 'Time between tokens',
      format: seconds,
      axis: secondsOfAxis,
      series: percentiles('tokenGap'),
    },
    {
      title: 'KV pages',
      format: count,
      axis: shorten,
      isStacked: true,
      series: [
        { label: 'private', value: point => point.pages.private },
        { label: 'shared', colour: 4, value: point => point.pages.tree_pinned },
        { label: 'cached', colour: 2, value: point => point.pages.tree_cached },
      ],
    },
    {
      title: 'Requests a second',
      format: rate,
      axis: shorten,
      isFilled: true,
      series: [{ label: 'ended', value: point => point.ended }],
    },
    {
      title: 'Errors a second, by status',
      format: rate,
      axis: shorten,
      series: Object.keys(ERRORS).map(label => ({ label, value: point => point.errors[label] })),
    },
  ];
  return charts.map(options => new Chart(options));
}

function secondsOfAxis(value) {
  if (value === 0) return '0';
  return value < 1
    ? `${Number((value * 1000).toPrecision(2))} ms`
    : `${Number(value.toPrecision(2))} s`;
}

/** Shows the live server in `#server-view`. It asks for metrics only while it is shown. */
export class ServerView {
  #place = byId('server-view');
  #history = null; // Null until the server's last minutes are there.
  #earlier = null; // What was shown before.
  #charts = [];
  #parts = null; // The elements that change, once the metrics can be read.
  #timer = 0;
  #isShown = false;

  /** Starts to show the server. */
  show() {
    if (this.#isShown) return;
    this.#isShown = true;
    this.#forget();
    this.#look();
  }

  /** Stops. */
  hide() {
    this.#isShown = false;
    clearTimeout(this.#timer);
  }

  #forget() {
    this.#earlier = this.#history ?? this.#earlier;
    this.#history = null;
  }

  async #look() {
    clearTimeout(this.#timer);
    try {
      // A hidden page asks nothing. What it misses comes from the server's last minutes.
      if (document.hidden) this.#forget();
      else await this.#ask();
    } catch (error) {
      this.#fail(error);
      if (error.status === 401 || error.status === 403) return;
    }
    if (this.#isShown) this.#timer = setTimeout(() => this.#look(), EACH_MS);
  }

  async #ask() {
    const signal = AbortSignal.timeout(EACH_MS * 4);
    if (!this.#history) {
      const recent = await fetchRecentMetrics(adminKey(), signal);
      this.#history = new History();
      this.#history.addRecent(performance.now(), recent, this.#earlier);
    }
    this.#take(await fetchMetrics(adminKey(), signal));
  }

  #take(text) {
    if (!this.#isShown || !this.#history) return;
    const series = parseMetrics(text);
    this.#history.add(performance.now(), series);
    if (!this.#parts) this.#build();
    this.#parts.state.textContent = this.#subtitle(series);
    this.#showTiles(this.#history.points.at(-1));
    for (const chart of this.#charts) chart.show(this.#history.points, this.#history.spanMs);
    this.#showTenants();
  }

  #build() {
    this.#charts = makeCharts();
    this.#parts = {
      state: element('p', { class: 'state' }),
      tiles: element('dl', { class: 'tiles' }),
      rows: element('tbody'),
    };
    const heads = [
      'Tenant',
      'Running',
      'Waiting',
      'KV pages',
      'Tokens/s',
      'Last 5 minutes',
      'First token p95',
      'Refused',
      'Tokens in all',
    ];
    const table = element(
      'table',
      {},
      element(
        'thead',
        {},
        element(
          'tr',
          {},
          heads.map(head => element('th', { scope: 'col' }, head)),
        ),
      ),
      this.#parts.rows,
    );
    this.#place.replaceChildren(
      element(
        'div',
        { class: 'server' },
        this.#parts.state,
        this.#parts.tiles,
        element(
          'div',
          { class: 'charts' },
          this.#charts.map(chart => chart.node),
        ),
        element(
          'section',
          { class: 'tenants' },
          element('h2', {}, 'Tenants'),
          element('p', {}, 'Refusals and percentiles are those of the last 30 seconds.'),
          element(
            'div',
            { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'Tenants' },
            table,
          ),
        ),
      ),
    );
  }

  #subtitle(series) {
    const { version, isa, model_name: model } = series.get('sterna_build_info')?.[0]?.labels ?? {};
    return (
      `${model} · Sterna ${version} · ${isa} · every ${EACH_MS / 1000} s, percentiles over ` +
      `${WINDOW_MS / 1000} s from histogram buckets`
    );
  }

  #showTiles(point) {
    const { pages } = point;
    const all = Object.values(pages).reduce((sum, value) => sum + value, 0);
    const cached = all ? pages.tree_cached / all : 0;
    const or = (value, write) => (value === null ? '–' : write(value));
    const tiles = [
      ['Running', count(point.running), ''],
      ['Waiting', count(point.waiting), ''],
      ['Generated', or(point.generated, rate), ' tokens/s'],
      ['First token p95', percentileText(point.firstToken.p95), ''],
      ['KV in use', share(point.kvUsage), ` and ${share(cached)} cached`],
      ['Prefix cache hits', or(point.hitShare, share), ''],
    ];
    this.#parts.tiles.replaceChildren(
      ...tiles.map(([name, value, unit]) =>
        element(
          'div',
          {},
          element('dt', {}, name),
          element('dd', {}, value, unit ? element('small', {}, unit) : null),
        ),
      ),
    );
  }

  #showTenants() {
    const { points } = this.#history;
    const now = points.at(-1).tenants;
    // `other` stands for tenants beyond the metrics' limit, and is empty on most servers.
    const shown = now.filter(
      ({ tenant, total, running, waiting }) => tenant !== 'other' || total + running + waiting > 0,
    );
    this.#parts.rows.replaceChildren(
      ...shown.map(row => {
        const past = points.map(
          point => point.tenants.find(({ tenant }) => tenant === row.tenant)?.generated,
        );
        const cells = [
          count(row.running),
          count(row.waiting),
          count(row.pages),
          row.generated === null ? '–' : rate(row.generated),
          sparkline(past),
          percentileText(row.firstToken),
          count(row.refused),
          count(row.total),
        ];
        return element(
          'tr',
          {},
          element('th', { scope: 'row' }, row.tenant),
          cells.map(cell => element('td', {}, cell)),
        );
      }),
    );
  }

  // Asks for the key that opens the metrics, or says that the server does not answer.
  #fail(error) {
    if (!this.#isShown) return;
    const needsKey = error.status === 401 || error.status === 403;
    if (!needsKey) {
      if (this.#parts) this.#parts.state.textContent = `${error.message} The charts stand still.`;
      else this.#place.replaceChildren(gate('The metrics cannot be read', error.message));
      return;
    }
    this.#parts = null;
    const input = element('input', { id: 'admin-key', type: 'password', autocomplete: 'off' });
    const onSubmit = event => {
      event.preventDefault();
      setAdminKey(input.value.trim());
      this.#look();
    };
    const text = adminKey()
      ? 'This key does not open them.'
      : 'They name all tenants of this server.';
    this.#place.replaceChildren(
      gate(
        'The metrics need the admin key',
        text,
        element(
          'form',
          { on: { submit: onSubmit } },
          element(
            'div',
            { class: 'field' },
            element('label', { for: 'admin-key' }, 'Admin key'),
            input,
          ),
          element('button', { type: 'submit', class: 'button primary' }, 'Show'),
        ),
      ),
    );
    input.focus();
  }
}

function gate(title, text, form = null) {
  return element('div', { class: 'gate' }, element('h2', {}, title), element('p', {}, text), form);
}
