// Reads the metrics in Prometheus's text format.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Returns the series by name: arrays of `{labels, value}`. */
export function parseMetrics(text) {
  const series = new Map();
  for (const line of text.split('\n')) {
    const match = LINE.exec(line);
    if (!match) continue;
    const [, name, labelText = '', value] = match;
    const labels = {};
    for (const [, label, raw] of labelText.matchAll(LABEL)) {
      labels[label] = raw.replace(/\\(.)/g, (_, c) => (c === 'n' ? '\n' : c));
    }
    if (!series.has(name)) series.set(name, []);
    series.get(name).push({ labels, value: Number(value.replace('Inf', 'Infinity')) });
  }
  return series;
}

// `wanted` has values of labels, or is a function that chooses among the labels.
function having(series, name, wanted) {
  const all = series.get(name) ?? [];
  if (typeof wanted === 'function') return all.filter(({ labels }) => wanted(labels));
  const keys = Object.keys(wanted);
  return all.filter(({ labels }) => keys.every(key => labels[key] === wanted[key]));
}

/** Returns the sum of the series of `name` that have these labels, or whose labels fit. */
export function gauge(series, name, labels = {}) {
  return having(series, name, labels).reduce((sum, { value }) => sum + value, 0);
}

/** Returns the values of a label of `name`, in their order. */
export function labelValues(series, name, label) {
  return [...new Set((series.get(name) ?? []).map(({ labels }) => labels[label]))].sort();
}

/** Returns a histogram: the upper bound of each bucket and how many values are at most this. */
export function histogram(series, name, labels = {}) {
  const buckets = having(series, `${name}_bucket`, labels)
    .map(({ labels: { le }, value }) => [Number(le.replace('Inf', 'Infinity')), value])
    .sort(([a], [b]) => a - b);
  return { bounds: buckets.map(([bound]) => bound), counts: buckets.map(([, value]) => value) };
}

/**
 * Returns the quantile of the values that came between two histograms, interpolated within its
 * bucket, or null if none came. It cannot be exact: `isBelow` says that it is in the lowest bucket,
 * so only the bucket's bound is known.
 */
export function quantileBetween(before, after, share) {
  const { bounds } = after;
  const counts = after.counts.map((count, index) => count - (before.counts[index] ?? 0));
  const total = counts.at(-1) ?? 0;
  if (total <= 0) return null;
  const rank = share * total;
  const index = counts.findIndex(count => count >= rank);
  if (index === 0) return { value: bounds[0], isBelow: true };
  if (bounds[index] === Infinity) return { value: bounds[index - 1], isBelow: false };
  const [low, high] = [counts[index - 1], counts[index]];
  const part = (rank - low) / (high - low);
  return { value: bounds[index - 1] + (bounds[index] - bounds[index - 1]) * part, isBelow: false };
}
