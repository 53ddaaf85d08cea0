// The monitor's minutes, gathered into steps that a chart can show.

const BUCKETS = ["head", "torso", "tail", "new"];
const NAMES = { head: "Head", torso: "Torso", tail: "Tail", new: "New", all: "All" };
const MINUTE = 60000;

const span = (name, window, length, words) => ({ name, window: window * MINUTE, span: length * MINUTE, words });

/** What the charts show beside each window: a span that gives it context. */
const SPANS = {
  "5m": span("the last 5 minutes", 5, 60, "the last hour"),
  "1h": span("the last hour", 60, 360, "the last 6 hours"),
  "24h": span("the last 24 hours", 1440, 1440, "the last 24 hours"),
};

/** What the charts show: the span, or of a young service the time since its start, in steps that fit a screen. */
function shownOf({ series }, now, { window, span, words }) {
  const begun = series.at.slice(0, 1).map((at) => Date.parse(at));
  const start = Math.floor(Math.min(now, ...begun) / MINUTE) * MINUTE;
  const young = start > now - span;
  const from = young ? start : now - span;
  const to = Math.max(now, from + 5 * MINUTE);
  const minutes = [1, 5, 15].find((length) => (to - from) / MINUTE <= 72 * length) ?? 15;
  const each = minutes === 1 ? ", minute by minute" : ` in steps of ${minutes} minutes`;
  const spanWords = `${young ? `since the start at ${clock(start)}` : words}${each}`;
  const shade = now - window > from ? [now - window, now] : null;
  return { from, to, step: minutes * MINUTE, spanWords, shade };
}

/** The monitor's series as steps of what is shown, oldest first: [{at, rows}], rows being indices of its minutes. */
function steps(series, { from, to, step }) {
  const found = new Map();
  series.at.forEach((text, row) => {
    const time = Date.parse(text);
    if (time < from || time > to) return;
    const at = Math.floor(time / step) * step;
    if (!found.has(at)) found.set(at, { at: Math.max(at, from), rows: [] });
    found.get(at).rows.push(row);
  });
  return [...found.values()].sort((a, b) => a.at - b.at);
}

/** Which release answered from when on, of the last day, oldest first: [{name, from}]. */
function served({ release, at }) {
  const first = release.map((name, row) => ({ name, from: Date.parse(at[row]) }));
  return first.filter(({ name }, row) => row === 0 || name !== release[row - 1]);
}

const sum = (values, rows) => rows.reduce((total, row) => total + (values[row] ?? 0), 0);
const highest = (values, rows) =>
  rows.reduce((top, row) => (known(values[row]) ? Math.max(top ?? 0, values[row]) : top), null);

/** Mean of the known values, each minute weighing as many queries as it had; null where there is none. */
function mean(values, rows, queries) {
  const there = rows.filter((row) => known(values[row]));
  const weight = there.map((row) => Math.max(queries[row], 1));
  const total = weight.reduce((a, b) => a + b, 0);
  return there.length ? there.reduce((a, row, i) => a + weight[i] * values[row], 0) / total : null;
}
