// How times, durations, numbers and ids are written.

const UNITS = [
  [86_400, "d"],
  [3600, "h"],
  [60, "m"],
];

/** 0.23 s, 12 s, 3 m 20 s, 2 h 5 m */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 0) return `-${span(-seconds)}`;
  if (seconds < 0.00005) return "< 0.1 ms";
  if (seconds < 0.0095) return `${round(seconds * 1000, 2)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  for (const [size, unit] of UNITS) {
    if (whole < size) continue;
    const next = UNITS[UNITS.findIndex(([s]) => s === size) + 1] ?? [1, "s"];
    const rest = Math.floor((whole % size) / next[0]);
    return rest ? `${Math.floor(whole / size)} ${unit} ${rest} ${next[1]}` : `${Math.floor(whole / size)} ${unit}`;
  }
  return `${whole} s`;
}

function round(value, digits) {
  return Number(value.toPrecision(digits));
}

/** "3 m ago" with one unit only, for lists. */
export function ago(at, now = Date.now() / 1000) {
  const seconds = Math.max(0, now - at);
  if (seconds < 2) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  for (const [size, unit] of UNITS) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  return "";
}

export function within(at, now = Date.now() / 1000) {
  return at >= now ? `in ${span(at - now)}` : ago(at, now);
}

/** 14:03:07.123 local; with the day if it is another one. */
export function clock(at, { millis = true } = {}) {
  const date = new Date(at * 1000);
  const time = date.toLocaleTimeString("en-GB") + (millis ? `.${String(date.getMilliseconds()).padStart(3, "0")}` : "");
  return date.toDateString() === new Date().toDateString() ? time : `${day(at)} ${time}`;
}

export function day(at) {
  const date = new Date(at * 1000);
  const pad = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
}

/** For hovering: local time with its zone, and UTC. */
export function full(at) {
  const date = new Date(at * 1000);
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  return `${day(at)} ${clock(at).split(" ").pop()} (${zone})\n${date.toISOString().replace("T", " ")} (UTC)`;
}

export function count(n) {
  return n === null || n === undefined ? "" : n.toLocaleString("en-US");
}

export function compact(n) {
  return n < 10_000 ? count(n) : Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 }).format(n);
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let value = n;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function percent(share) {
  return `${Math.round(share * 100)}%`;
}

export function plural(n, noun, many = `${noun}s`) {
  return `${count(n)} ${n === 1 ? noun : many}`;
}

/** The end of an id tells jobs apart: its beginning is the time. */
export function shortId(id) {
  return /^[0-9a-hjkmnp-tv-z]{26}$/.test(id) ? `…${id.slice(-8)}` : id;
}
