// Latency, load, and the releases that were served.

function load(view) {
  const { requests, ids } = view.window;
  const unknown = (kind) => percent(ids[kind].share);
  figures(byId("load-figures"), [
    ["Requests", count(requests.count), `${rate(requests.per_second)} per second`],
    ["p50", milliseconds(requests.p50_ms)],
    ["p99", milliseconds(requests.p99_ms)],
    ["Turned away", count(requests.shed), "answered 429, the queue was full"],
    ["Errors", count(requests.errors)],
    ["Unknown ids", unknown("query"), `of queries; ${unknown("history")} of histories, ${unknown("feedback")} of feedback`],
  ]);
  const host = byId("load-charts");
  if (!view.steps.length) {
    host.replaceChildren(empty("No requests yet; latency and load appear within a minute of the first."));
    return;
  }
  if (!host.querySelector("article")) {
    const article = (title) => el("article", {}, el("h3", {}, title), el("div"), el("div"));
    host.replaceChildren(article("Latency"), article("Requests per second"));
  }
  latency(host.firstElementChild, view);
  traffic(host.lastElementChild, view);
}

function latency({ children: [, plot, alternative] }, view) {
  const { p50_ms, p99_ms, queries } = view.data.series;
  const usual = ({ rows }) => mean(p50_ms, rows, queries);
  const slow = ({ rows }) => highest(p99_ms, rows);
  overTime(plot, view, {
    label: "Latency, median and 99th percentile",
    height: 170,
    lines: [
      { kind: "all", name: "p99", end: "p99", values: slow },
      { kind: "calm", name: "p50", end: "p50", values: usual },
    ],
    y: { floor: 1, format: (value, exact) => (exact ? milliseconds(value) : `${short(value)}\u00a0ms`) },
  });
  const columns = ["p50", "p99, highest minute"];
  timeTable(alternative, "Latency as a table", view, columns, (step) => [
    milliseconds(usual(step)),
    milliseconds(slow(step)),
  ]);
}

function traffic({ children: [, plot, alternative] }, view) {
  const { requests_per_second, shed, step_seconds } = view.data.series;
  const arriving = ({ rows }) => sum(requests_per_second, rows) / rows.length;
  const refused = ({ rows }) => sum(shed, rows) / (rows.length * step_seconds);
  overTime(plot, view, {
    label: "Requests, and requests turned away, per second",
    height: 170,
    lines: [
      { kind: "all", name: "requests", end: "requests", values: arriving },
      { kind: "bad", name: "turned away", end: "away", values: refused },
    ],
    y: { floor: 0.1, format: (value, exact) => (exact ? rate(value) : short(value)) },
  });
  timeTable(alternative, "Load as a table", view, ["Requests per second", "Turned away"], (step) => [
    rate(arriving(step)),
    count(sum(shed, step.rows)),
  ]);
}

function releases(view) {
  const { labels } = view.data;
  figures(byId("label-figures"), [
    ["Labels added", count(labels.added), "since the build"],
    ["Labels hidden", count(labels.hidden)],
    ["Labels available", count(labels.available), "now"],
  ]);
  const oldestFirst = served(view.data.series);
  const rows = oldestFirst.map(({ name, from }, i) => {
    const until = oldestFirst[i + 1]?.from;
    return el(
      "tr",
      { class: until ? "" : "current" },
      el("th", { scope: "row" }, name),
      el("td", {}, moment(from)),
      el("td", {}, until ? moment(until) : "now"),
      el("td", {}, duration((until ?? view.now) - from)),
    );
  });
  byId("history").replaceChildren(...rows.reverse());
}
