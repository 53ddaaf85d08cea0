// The dial's offline curve at μ = 0: what each λ costs and gives, with the default and what is asked for.

function dial(view, { bias_removal, popularity, cooccurrence, forecast }) {
  const { default: preset, chosen_by: chosen, curve_split: split } = bias_removal;
  const weight = cooccurrence?.default ?? 0;
  const curve = bias_removal.curve.filter((point) => !point.popularity && point.cooccurrence === weight);
  const asked = settings(view.window.dials.bias_removal);
  const prior = popularity.default ? ` with μ ${lambda(popularity.default)}` : "";
  const today = asked.length ? `${upper(view.words)}: ${commonest(view.window.dials.bias_removal)}. ` : "";
  const setting = `${today}The default is ${lambda(preset)}${prior}, chosen by ${chosen}.${foretold(forecast)}`;
  const charts = byId("dial-charts");
  if (!curve.length) {
    say(byId("dial-lead"), setting);
    charts.replaceChildren(
      empty(
        "No curve: this release was not evaluated offline. Train with a validation split to see what each λ costs.",
      ),
    );
    return;
  }
  say(byId("dial-lead"), `${setting} To the left the tail gains, to the right the head. Curves are measured offline, on ${split}.`);
  const k = cutoff(curve, view.data.baseline);
  const plots = [
    { metric: `recall@${k}`, title: `Recall@${k} against λ`, tick: short, figure: recall },
    {
      metric: `exposure@${k}`,
      title: `Share of the top ${k} against λ`,
      tick: (share) => percent(share, 0),
      figure: percent,
    },
  ].filter(({ metric }) => curveKeys(curve, metric).length);
  if (charts.querySelectorAll("article").length !== plots.length) {
    charts.replaceChildren(...plots.map(() => el("article", {}, el("h3"), el("div"), el("div"))));
  }
  const marks = [{ at: preset, text: `default ${lambda(preset)}`, kind: "preset" }];
  for (const { at, share } of asked.slice(0, 3).filter(({ at, share }) => share >= 0.1 && Math.abs(at - preset) > 0.03)) {
    marks.push({ at, text: `${percent(share, 0)} at ${lambda(at)}`, kind: "now" });
  }
  plots.forEach((plot, i) => curveChart(charts.children[i], curve, plot, marks));
}

/** The k to show: the baseline's, else 20, else the first that was measured. */
function cutoff(curve, baseline) {
  const measured = Object.keys(curve[0].metrics)
    .map((metric) => /^recall@(\d+)$/.exec(metric)?.[1])
    .filter(Boolean)
    .map(Number);
  return [baseline?.k, 20, measured[0]].find((k) => measured.includes(k));
}

const curveKeys = (curve, metric) =>
  KINDS.map((kind) => [kind, kind === "all" ? metric : `${metric}/${kind}`]).filter(
    ([, key]) => key in curve[0].metrics,
  );

function curveChart(article, curve, { metric, title, tick, figure }, marks) {
  const [heading, plot, alternative] = article.children;
  say(heading, title);
  const lines = curveKeys(curve, metric).map(([kind, key]) => {
    const measured = curve.map((point) => ({ at: point.bias_removal, ...point.metrics[key] }));
    // The interval of a few pairs that are never found would hide the rest.
    const banded = measured.some(({ value }) => value) && measured.every(({ low, high }) => known(low) && known(high));
    return {
      kind,
      name: kind,
      end: NAMES[kind],
      measured,
      points: measured.map(({ at, value }) => [at, value]),
      band: banded ? measured.map(({ at, low, high }) => [at, low, high]) : null,
    };
  });
  const shown = [...curve.map((point) => point.bias_removal), ...marks.map(({ at }) => at)];
  const [from, to] = [Math.min(...shown), Math.max(...shown, Math.min(...shown) + 0.1)];
  chart(plot, {
    label: `${title}, offline, with the default and what is asked for marked; the table has the figures`,
    height: 230,
    lines,
    marks,
    x: { from, to, format: (at) => `λ ${lambda(at)}`, ticks: (width) => lambdaTicks(from, to, width) },
    y: {
      max: Math.max(...lines.flatMap(({ points, band }) => (band ?? points).map((point) => point.at(-1)))),
      ticks: 4,
      format: (value, exact) => (exact ? figure(value) : tick(value)),
    },
  });
  const cell = ({ value, low, high }) => `${figure(value)}${known(low) ? ` (${figure(low)}–${figure(high)})` : ""}`;
  dataTable(alternative, `${title} as a table`, ["λ", ...lines.map(({ end }) => end)], () =>
    curve.map((point, row) => [lambda(point.bias_removal), ...lines.map(({ measured }) => cell(measured[row]))]),
  );
}

function lambdaTicks(from, to, width) {
  const step = [0.1, 0.2, 0.25, 0.5].find((size) => (to - from) / size <= width / 48) ?? 1;
  const first = Math.ceil(from / step - 1e-9);
  const last = Math.floor(to / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => [(first + i) * step, short((first + i) * step)]);
}

function foretold(forecast) {
  if (!forecast) return "";
  const { served, until, nats } = forecast;
  const gain = nats[served] - nats.count;
  const at = new Date(until * 1000).toISOString().slice(0, 16).replace("T", " ");
  return ` μ multiplies a forecast of popularity by pairs up to ${at}; it made the latest ones ${gain.toFixed(2)} nats likelier than counts.`;
}
