// Numbers, times and words, the same everywhere on the page.

const NONE = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

const fixed = (value, digits) => (known(value) ? value.toFixed(digits).replace("-", "−") : NONE);
const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : NONE);
const percent = (value, digits = 1) => (known(value) ? `${fixed(100 * value, digits)}\u00a0%` : NONE);
const points = (value) => (known(value) ? `${value < 0 ? "" : "+"}${fixed(100 * value, 1)}\u00a0pt` : NONE);
const recall = (value) => fixed(value, 3);
const lambda = (value) => fixed(value, 2);
const rate = (value) => fixed(value, value < 10 ? 2 : value < 100 ? 1 : 0);
const milliseconds = (value) => (known(value) ? `${rate(value)}\u00a0ms` : NONE);
const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
const upper = (text) => text[0].toUpperCase() + text.slice(1);
const short = (value) => String(Number(value.toFixed(6))).replace("-", "−");

const clock = (time) => new Date(time).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
const clockSeconds = (time) => new Date(time).toLocaleTimeString("en-GB");
const day = (time) => new Date(time).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
const moment = (time) => `${day(time)} ${clock(time)}`;

/** A length of time in its two largest units; milliseconds in. */
function duration(length) {
  const minutes = Math.max(0, Math.floor(length / 60000));
  const [d, h, m] = [Math.floor(minutes / 1440), Math.floor(minutes / 60) % 24, minutes % 60];
  return d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : `${m} min`;
}

/** How far a distribution is from its baseline, in words, by the usual bounds of the PSI. */
const drift = (psi) => (psi < 0.1 ? "steady" : psi <= 0.25 ? "shifted" : "drifted");
