// Recall by bucket, from feedback and from organic interactions: the window's intervals, the steps over time.

const KINDS = ["all", ...BUCKETS];
const ASK_FOR = {
  feedback: ["No feedback", "Report what users took of an answer: ", '{"events": [{"answer_id": …, "labels": […]}]}'],
  organic: [
    "No organic interaction",
    "Report what users took elsewhere: ",
    '{"events": [{"features": …, "labels": […]}]}',
  ],
};

function recalls(view) {
  const { recall: sources, queries } = view.data.series;
  const over =
    (source, kind) =>
    ({ rows }) =>
      mean(sources[source][kind], rows, queries);
  const every = Object.keys(ASK_FOR).flatMap((source) => KINDS.map((kind) => over(source, kind)));
  const highestSeen = Math.max(0.05, ...every.flatMap((values) => view.steps.map((step) => values(step) ?? 0)));
  for (const source of Object.keys(ASK_FOR)) {
    recallFrom(source, view, (kind) => over(source, kind), highestSeen);
  }
}

function recallFrom(source, view, over, floor) {
  const body = byId(source).querySelector(".body");
  const now = view.window.recall[source];
  if (!now.all.positives && view.steps.every((step) => over("all")(step) === null)) {
    const [none, how, call] = ASK_FOR[source];
    body.replaceChildren(empty(`${none} yet. ${how}`, code(`POST /v1/feedback ${call}`)));
    return;
  }
  if (!body.querySelector("table")) {
    body.replaceChildren(el("table", { class: "intervals" }), el("p", { class: "note" }), el("div"), el("div"));
  }
  const [table, title, plot, alternative] = body.children;
  say(title, `Over time, ${view.spanWords}`);
  intervals(table, now, `exact 95\u00a0% intervals, ${view.words}`);
  overTime(plot, view, {
    label: `Recall by bucket from ${source}`,
    height: 190,
    lines: KINDS.map((kind) => ({ kind, name: kind, end: NAMES[kind], values: over(kind) })),
    y: { floor, format: (value, exact) => (exact ? recall(value) : short(value)) },
  });
  const columns = KINDS.map((kind) => NAMES[kind]);
  timeTable(alternative, `Recall by ${source} as a table`, view, columns, (step) =>
    KINDS.map((kind) => recall(over(kind)(step))),
  );
}

/** The window's figures: recall, its interval drawn and written, what it rests on. */
function intervals(table, now, caption) {
  const top = Math.max(0.05, ...KINDS.map((kind) => now[kind].high ?? 0));
  const row = (kind) => {
    const { value, low, high, hits, positives } = now[kind];
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, nameOf(kind)),
      el("td", {}, recall(value)),
      el("td", { class: "graphic" }, known(value) ? whisker(kind, now[kind], top) : ""),
      el("td", {}, known(low) ? `${recall(low)}–${recall(high)}` : NONE),
      el("td", {}, `${count(hits)} / ${count(positives)}`),
    );
  };
  const heading = (text) => (text ? el("th", { scope: "col" }, text) : el("td"));
  table.replaceChildren(
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...["", "Recall", "", "95\u00a0% interval", "Hits / positives"].map(heading))),
    el("tbody", {}, ...KINDS.map(row)),
  );
}

/** A dot on its interval, on an axis from 0 to `top`. */
function whisker(kind, { value, low, high }, top) {
  const at = (share) => `${(2 + (96 * share) / top).toFixed(2)}%`;
  return svg(
    "svg",
    { class: "whisker", height: 14, width: "100%", "aria-hidden": "true" },
    rule("track", at(0), 7, at(top), 7),
    rule(`reach ${kind}`, at(low), 7, at(high), 7),
    svg("circle", { class: `dot ${kind}`, cx: at(value), cy: 7, r: 4 }),
  );
}
