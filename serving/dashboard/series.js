// The monitor's minutes, gathered into steps that a chart can show.

const BUCKETS = ["head", "torso", "tail", "new"];
const NAMES = { head: "Head", torso: "Torso", tail: "Tail", new: "New", all: "All" };
const MINUTE = 60000;

const span = (name, window, length, step, words) => ({
  name,
  window: window * MINUTE,
  span: length * MINUTE,
  step: step * MINUTE,
  words,
});

/** What the charts show beside each window: a span that gives it context, in steps that fit a screen. */
const SPANS = {
  "5m": span("the last 5 minutes", 5, 60, 1, "the last hour, minute by minute"),
  "1h": span("the last hour", 60, 360, 5, "the last 6 hours in steps of 5 minutes"),
  "24h": span("the last 24 hours", 1440, 1440, 15, "the last 24 hours in steps of 15 minutes"),
};

/** The monitor's series as steps of the span, oldest first: [{at, rows}], rows being the indices of its minutes. */
function steps(series, now, { span, step }) {
  const found = new Map();
  series.at.forEach((text, row) => {
    const time = Date.parse(text);
    if (time < now - span || time > now) return;
    const at = Math.floor(time / step) * step;
    if (!found.has(at)) found.set(at, { at: Math.max(at, now - span), rows: [] });
    found.get(at).rows.push(row);
  });
  return [...found.values()].sort((a, b) => a.at - b.at);
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
