// Writes numbers for people.

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });

/** Returns a count such as `1,024`. */
export function count(value) {
  return whole.format(value);
}

/** Returns a time such as `84 ms` or `3.2 s`. */
export function duration(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round(ms / 1000) % 60} s`;
}

/** Returns a rate such as `9.4` or `118`. */
export function rate(value) {
  return value < 10 ? value.toFixed(1) : count(value);
}
