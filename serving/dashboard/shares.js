// What every bucket gets: a row of each, drift.

const nameOf = (bucket) => el("span", { class: `name ${bucket}` }, NAMES[bucket]);
const code = (text) => el("code", {}, text);
const empty = (...words) => el("p", { class: "empty" }, ...words);

function shares(view) {
  const { window, data } = view;
  figures(byId("totals"), [
    ["Queries", count(window.queries), data.baseline && window.judged.queries < window.queries ? `the promise covers ${count(window.judged.queries)} of them` : ""],
    ["Mean λ", lambda(window.bias_removal), commonest(window.dials.bias_removal)],
    ["Coverage", percent(window.coverage), "of all labels were answered"],
    ["Gini", fixed(data.gini, 2), "0: all labels alike, 1: one has all; two days"],
    ["Popularity", fixed(window.popularity, 1), "training pairs of an answered label"],
    [
      "Drift of scores",
      fixed(window.psi.scores, 2),
      `PSI against offline answers${known(window.psi.scores) ? `; ${drift(window.psi.scores)}` : ""}`,
    ],
  ]);
  const rows = byId("share-rows");
  for (const id of ["share-titles", "share-rows", "share-note", "share-table"]) byId(id).hidden = !view.steps.length;
  if (!rows.children.length) {
    for (const _ of [...BUCKETS, "drift"]) {
      rows.append(el("div", { class: "row" }, el("div", { class: "facts" }), el("div")));
    }
  }
  BUCKETS.forEach((bucket, i) => shareRow(rows.children[i], bucket, view, i === 0));
  driftRow(rows.lastElementChild, view);
  say(byId("share-title"), `Share of the answers, ${view.words}`);
  say(byId("share-span"), `Over time, ${view.spanWords}`);
  const { queries: judged } = window.judged;
  const apart = judged < window.queries ? ` Promised: at the λ and length of ${count(judged)} of the ${count(window.queries)} answers; the others have no promise.` : " Promised: what calibration queries get at the same λ and length.";
  const shaded = view.shade ? "The window is shaded; upright" : "Upright";
  say(byId("share-note"), `${shaded} lines are swaps of the release.${data.baseline ? apart : ""}`);
  const { share, psi, bias_removal, queries } = data.series;
  const columns = ["Queries", "Head", "Torso", "Tail", "New", "PSI", "Mean λ"];
  timeTable(byId("share-table"), "Shares and drift as a table", view, columns, ({ rows }) => [
    count(sum(queries, rows)),
    ...BUCKETS.map((bucket) => percent(mean(share[bucket], rows, queries))),
    fixed(mean(psi, rows, queries), 3),
    lambda(mean(bias_removal, rows, queries)),
  ]);
}

function shareRow(row, bucket, view, first) {
  const { share: live, coverage } = view.window.exposures[bucket];
  const { promised: promises, shares, queries: judged } = view.window.judged;
  const promised = promises[bucket];
  const covered = shares[bucket];
  const { share, queries } = view.data.series;
  // The promise may cover fewer answers, and of longer ones the first labels alone: the difference is of what it covers.
  const apart = judged < view.window.queries || percent(covered) !== percent(live);
  const of = apart ? `${percent(covered)} in what the promise covers, ${count(judged)} of ${plural(view.window.queries, "answer")}; ` : "";
  const against = known(promised) ? `${of}promised ${percent(promised)}, ${points(covered - promised)} · ` : "";
  row.firstElementChild.replaceChildren(
    el("p", { class: "headline" }, nameOf(bucket), el("strong", { id: `share-${bucket}` }, percent(live))),
    bullet(bucket, live, promised),
    el("p", { class: "note" }, `${against}coverage ${percent(coverage)}`),
  );
  overTime(row.lastElementChild, view, {
    label: `${NAMES[bucket]} share of the answers`,
    height: first ? 98 : 84,
    margin: "promised",
    named: first,
    labelled: false,
    lines: [{ kind: bucket, name: bucket, values: ({ rows }) => mean(share[bucket], rows, queries) }],
    levels: known(promised) ? [{ at: promised, text: "promised", kind: "promised" }] : [],
    y: { floor: 0.01, ticks: 2, format: (value, exact) => (exact ? percent(value) : `${short(100 * value)}\u00a0%`) },
  });
}

/** The live share as a bar from 0 to 100 %, the promise as a tick across it. */
function bullet(bucket, live, promised) {
  const at = (share) => `${(100 * share).toFixed(2)}%`;
  return svg(
    "svg",
    { class: "bullet", height: 14, width: "100%", "aria-hidden": "true" },
    svg("rect", { class: "track", y: 4, width: "100%", height: 6 }),
    svg("rect", { class: bucket, y: 4, width: at(live ?? 0), height: 6 }),
    known(promised) ? rule("baseline", at(promised), 0, at(promised), 14) : null,
  );
}

function driftRow(row, view) {
  const { psi, queries } = view.data.series;
  row.firstElementChild.replaceChildren(
    el(
      "p",
      { class: "headline" },
      el("span", { class: "name all" }, "Drift"),
      el("strong", { id: "psi" }, fixed(view.window.psi.buckets, 2)),
    ),
    el("p", { class: "note" }, "From the offline answers (PSI; new and tail together): below 0.1 steady, 0.1–0.25 shifted, above drifted"),
  );
  overTime(row.lastElementChild, view, {
    label: "Population stability index of the shares",
    height: 98,
    margin: "baseline",
    named: false,
    lines: [{ kind: "all", name: "PSI", values: ({ rows }) => mean(psi, rows, queries) }],
    levels: [
      { at: 0.1, text: "shifted", kind: "bound" },
      { at: 0.25, text: "drifted", kind: "bound" },
    ],
    y: { floor: 0.3, ticks: 3, format: (value, exact) => fixed(value, exact ? 3 : 1) },
  });
}
