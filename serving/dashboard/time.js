// Charts over time: the monitor's steps, the release's swaps, the window.

/** A chart of lines [{kind, name, end?, values(step) → number or null}] over the span that ends now. */
function overTime(host, view, { lines, label, y, levels = [], named = true, labelled = true, ...rest }) {
  const { from, to } = view;
  const drawn = lines.map((line) => ({ ...line, points: view.steps.map((step) => [step.at, line.values(step)]) }));
  const values = drawn.flatMap((line) => line.points.map((point) => point[1] ?? 0));
  chart(host, {
    ...rest,
    label: `${label}, ${view.spanWords}; the table has the figures`,
    lines: drawn,
    levels,
    x: { from, to, ticks: labelled ? (width) => timeTicks(from, to, width) : null, format: clock },
    y: { ticks: 4, ...y, max: Math.max(y.floor, ...values, ...levels.map(({ at }) => at)) },
    marks: swaps(view).map((swap) => ({ ...swap, text: named ? swap.text : null })),
    shade: view.shade,
    gap: 1.6 * view.step,
  });
}

/** When the release changed within the span. */
function swaps({ from: shown, data }) {
  const changes = served(data.series).slice(1);
  return changes.map(({ name, from }) => ({ at: from, text: name, kind: "swap" })).filter(({ at }) => at > shown);
}

/** The table of a chart over time, newest step first; cells(step) → texts. */
function timeTable(host, title, view, columns, cells) {
  const rows = () => view.steps.map((step) => [moment(step.at), ...cells(step)]).reverse();
  dataTable(host, title, ["From", ...columns], rows);
}
