// A chart over time: lines, or areas on top of each other, drawn as SVG.

import { element, svgElement } from '../elements/element.js';

const HEIGHT = 176;
const MARGIN = { top: 8, right: 4, bottom: 20, left: 44 };
const LINES = 3;

/**
 * A chart of several series. `series` are `{label, value}`, where `value` takes a point and returns
 * a number, or null for a gap. `format` writes a value, and `axis` one beside the drawing.
 */
export class Chart {
  node;
  #options;
  #legend = element('ul', { class: 'legend' });
  #drawing = svgElement('svg', { role: 'img', height: HEIGHT });
  #width = 400;
  #points = [];
  #spanMs = 1;
  #pointed = null; // The index of the point under the pointer.

  constructor(options) {
    this.#options = options;
    this.node = element(
      'figure',
      { class: 'chart' },
      element('figcaption', {}, element('h2', {}, options.title), this.#legend),
      this.#drawing,
    );
    this.#drawing.addEventListener('pointermove', event => this.#point(event));
    this.#drawing.addEventListener('pointerleave', () => {
      this.#pointed = null;
      this.#draw();
    });
    new ResizeObserver(([{ contentRect }]) => {
      this.#width = contentRect.width;
      this.#draw();
    }).observe(this.#drawing);
  }

  /** Shows `points`, each with its `time`, over the last `spanMs`. */
  show(points, spanMs) {
    this.#points = points;
    this.#spanMs = spanMs;
    if (this.#pointed !== null) this.#pointed = Math.min(this.#pointed, points.length - 1);
    this.#draw();
  }

  get #now() {
    return this.#points.at(-1)?.time ?? 0;
  }

  // Returns the class that colours a series.
  #colourOf(index) {
    return `s${this.#options.series[index].colour ?? index + 1}`;
  }

  #x(time) {
    const inner = this.#width - MARGIN.left - MARGIN.right;
    return MARGIN.left + inner * (1 - (this.#now - time) / this.#spanMs);
  }

  #point({ offsetX }) {
    const distances = this.#points.map(({ time }) => Math.abs(this.#x(time) - offsetX));
    this.#pointed = distances.length ? distances.indexOf(Math.min(...distances)) : null;
    this.#draw();
  }

  #draw() {
    const { series, isStacked, most = 0, least = 0 } = this.#options;
    const layers = isStacked
      ? stack(this.#points, series)
      : series.map(({ value }) => this.#points.map(point => ({ low: 0, high: value(point) })));
    const highest = Math.max(least, ...layers.flat().map(({ high }) => high ?? 0));
    const top = most || niceCeiling(highest);
    const inner = HEIGHT - MARGIN.top - MARGIN.bottom;
    const y = value => MARGIN.top + inner * (1 - Math.min(value, top) / top);
    const marks = layers.flatMap((layer, index) => this.#marks(layer, index, y));
    if (layers.flat().every(({ high }) => high === null)) {
      const text = this.#points.length < 2 ? 'Measuring' : 'No requests in this time';
      marks.push(
        svgElement(
          'text',
          { x: (MARGIN.left + this.#width) / 2, y: HEIGHT / 2, 'text-anchor': 'middle' },
          text,
        ),
      );
    }
    this.#drawing.setAttribute('viewBox', `0 0 ${this.#width} ${HEIGHT}`);
    this.#drawing.replaceChildren(...this.#grid(top, y), ...marks, ...this.#cursor(layers, y));
    this.#showLegend();
  }

  #grid(top, y) {
    const right = this.#width - MARGIN.right;
    const nodes = [];
    for (let line = 0; line <= LINES; line += 1) {
      const value = (top * line) / LINES;
      const at = y(value);
      nodes.push(svgElement('line', { class: 'grid', x1: MARGIN.left, x2: right, y1: at, y2: at }));
      nodes.push(
        svgElement(
          'text',
          { x: MARGIN.left - 8, y: at + 4, 'text-anchor': 'end' },
          this.#options.axis(value),
        ),
      );
    }
    const seconds = Math.round(this.#spanMs / 1000);
    const ago = seconds < 120 ? `${seconds} s ago` : `${Math.round(seconds / 60)} min ago`;
    const label = (x, anchor, text) =>
      svgElement('text', { x, y: HEIGHT - 4, 'text-anchor': anchor }, text);
    return [...nodes, label(MARGIN.left, 'start', ago), label(right, 'end', 'now')];
  }

  #marks(layer, index, y) {
    const runs = runsOf(layer);
    const at = ({ index: place, value }) =>
      `${this.#x(this.#points[place].time).toFixed(1)} ${y(value).toFixed(1)}`;
    const name = this.#colourOf(index);
    return runs.flatMap(run => {
      const highs = run.map(place => at({ index: place, value: layer[place].high }));
      const lows = run.map(place => at({ index: place, value: layer[place].low })).reverse();
      const kind = this.#options.isStacked ? 'area stacked' : 'area';
      const isFilled = this.#options.isStacked || (this.#options.isFilled && index === 0);
      const line = svgElement('path', { class: `line ${name}`, d: `M${highs.join('L')}` });
      if (run.length === 1) {
        const [cx, cy] = highs[0].split(' ');
        return [svgElement('circle', { class: `point ${name}`, cx, cy, r: 2 })];
      }
      if (!isFilled) return [line];
      return [
        svgElement('path', { class: `${kind} ${name}`, d: `M${[...highs, ...lows].join('L')}Z` }),
        line,
      ];
    });
  }

  #cursor(layers, y) {
    const place = this.#pointed;
    if (place === null || !this.#points[place]) return [];
    const x = this.#x(this.#points[place].time);
    const dots = layers.flatMap((layer, index) =>
      layer[place].high === null
        ? []
        : [
            svgElement('circle', {
              class: `point ${this.#colourOf(index)}`,
              cx: x,
              cy: y(layer[place].high),
              r: 3,
            }),
          ],
    );
    const line = svgElement('line', { class: 'cursor', x1: x, x2: x, y1: MARGIN.top, y2: y(0) });
    return [line, ...dots];
  }

  #showLegend() {
    const point = this.#points[this.#pointed ?? this.#points.length - 1];
    const texts = this.#options.series.map(series => {
      const value = point ? series.value(point) : null;
      if (value === null) return '–';
      return series.text ? series.text(point) : this.#options.format(value);
    });
    this.#legend.replaceChildren(
      ...this.#options.series.map(({ label }, index) =>
        element(
          'li',
          { class: this.#colourOf(index) },
          element('i'),
          `${label} `,
          element('b', {}, texts[index]),
        ),
      ),
    );
    const summary = this.#options.series.map(({ label }, index) => `${label} ${texts[index]}`);
    this.#drawing.setAttribute('aria-label', `${this.#options.title}, now: ${summary.join(', ')}`);
  }
}

function stack(points, series) {
  const floors = points.map(() => 0);
  return series.map(({ value }) =>
    points.map((point, index) => {
      const low = floors[index];
      floors[index] += value(point) ?? 0;
      return { low, high: floors[index] };
    }),
  );
}

// Returns the places of a layer in runs without gaps.
function runsOf(layer) {
  const runs = [];
  let isOpen = false;
  layer.forEach(({ high }, index) => {
    if (high === null) {
      isOpen = false;
      return;
    }
    if (!isOpen) runs.push([]);
    isOpen = true;
    runs.at(-1).push(index);
  });
  return runs;
}

// Returns a round number of at least `value`, a multiple of three steps.
function niceCeiling(value) {
  if (!(value > 0)) return LINES;
  const magnitude = 10 ** Math.floor(Math.log10(value / LINES));
  const step = [1, 2, 2.5, 5, 10].find(factor => factor * magnitude * LINES >= value);
  return step * magnitude * LINES;
}

/** Returns the outline of a small chart without axes. */
export function sparkline(values) {
  const most = Math.max(1, ...values.map(value => value ?? 0));
  const step = values.length > 1 ? 100 / (values.length - 1) : 0;
  const at = (value, index) =>
    `${(index * step).toFixed(1)} ${(23 - 22 * ((value ?? 0) / most)).toFixed(1)}`;
  return svgElement(
    'svg',
    { viewBox: '0 0 100 24', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
    svgElement('path', {
      d: `M${values.map(at).join('L')}`,
      'vector-effect': 'non-scaling-stroke',
    }),
  );
}
