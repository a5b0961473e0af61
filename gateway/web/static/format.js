// Numbers as people read them: three digits, one unit.

const PLAIN = new Intl.NumberFormat("en");
const UNITS = [[1e9, "G"], [1e6, "M"], [1e4, "k"]];

export const whole = (value) => PLAIN.format(Math.round(value));

// What comes in ones only.
export const tally = (value) => (value < 1e4 ? whole(value) : short(value));

export function short(value) {
  for (const [size, unit] of UNITS) {
    if (value >= size) return digits(value / (unit === "k" ? 1e3 : size)) + unit;
  }
  return value >= 100 ? whole(value) : digits(value);
}

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 2 });

// In four characters, for where there is little room.
export const brief = (value) => COMPACT.format(value).replace("K", "k");

export function digits(value) {
  if (value === 0 || value >= 99.95) return String(Math.round(value));
  return value >= 9.995 ? value.toFixed(1) : value.toFixed(value >= 1 ? 1 : 2);
}

export function time(ms) {
  if (ms === null) return "–";
  if (ms < 1) return `${Math.max(10, Math.round(ms * 100) * 10)} µs`;
  return ms < 1000 ? `${digits(ms)} ms` : `${digits(ms / 1000)} s`;
}

export const share = (value) => `${value > 0 && value < 0.01 ? "< 1" : Math.round(value * 100)} %`;

export function ago(seconds) {
  if (seconds < 2) return "just now";
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

export const count = (number, noun, nouns = `${noun}s`) => `${tally(number)} ${number === 1 ? noun : nouns}`;
