// The last two minutes of counters, and what follows from them: rates, and quantiles of histograms.

const KEPT_S = 120;
const WINDOW_S = 60;
const SMOOTH_S = 5;

export class History {
  constructor() {
    this.samples = [];
  }

  add(sample) {
    this.samples.push(sample);
    while (sample.s - this.samples[0].s > KEPT_S) this.samples.shift();
  }

  get last() {
    return this.samples.at(-1);
  }

  // The newest sample that is at least so old, or the oldest.
  before(seconds) {
    const limit = this.last.s - seconds;
    return this.samples.findLast((sample) => sample.s <= limit) ?? this.samples[0];
  }

  // Per second, over the last few.
  rate(name, seconds = SMOOTH_S) {
    return rate(this.last, this.before(seconds), name);
  }

  // One rate for each pair of samples, with its time.
  rates(name) {
    return this.samples.slice(1).map((sample, index) => [sample.s, rate(sample, this.samples[index], name)]);
  }

  // [time, value] of each sample.
  values(name) {
    return this.samples.map((sample) => [sample.s, sample[name]]);
  }

  // Counts of a histogram in the last minute; of all time where nothing came in it.
  counts(name) {
    const then = this.before(WINDOW_S)[name];
    const recent = this.last[name].map((value, index) => value - then[index]);
    return recent.some(Boolean) ? [recent, true] : [this.last[name], false];
  }
}

function rate(now, then, name) {
  const seconds = now.s - then.s;
  return seconds > 0 ? Math.max(0, (now[name] - then[name]) / seconds) : 0;
}

export const sum = (counts) => counts.reduce((total, count) => total + count, 0);

// The value below which a share q of the counts lies, null of none. A bucket's values are spread evenly in it.
export function quantile(bounds, counts, q) {
  const total = sum(counts);
  if (!total) return null;
  let left = q * total;
  for (let index = 0; index < counts.length; index++) {
    if (left <= counts[index] && counts[index]) {
      const low = index ? bounds[index - 1] : 0;
      const high = bounds[Math.min(index, bounds.length - 1)];
      return low + (high - low) * (left / counts[index]);
    }
    left -= counts[index];
  }
  return bounds.at(-1);
}
