// What queries asked of the dials: a mean hides that some ask for the tail and some for the head.

const DIALS = [
  { dial: "bias_removal", symbol: "λ", preset: (release) => release.bias_removal.default },
  { dial: "popularity_weight", symbol: "μ", preset: (release) => release.popularity.default },
  { dial: "cooccurrence", symbol: "ω", preset: (release) => release.cooccurrence?.default ?? 0 },
];

/** The settings of a dial that were asked for, the commonest first: [{at, share}]. */
function settings(asked) {
  const total = asked.reduce((sum, { queries }) => sum + queries, 0);
  return asked.map(({ at, queries }) => ({ at, share: queries / total })).sort((a, b) => b.share - a.share);
}

/** The commonest two in words. */
const commonest = (asked) =>
  settings(asked)
    .slice(0, 2)
    .map(({ at, share }) => `${percent(share, 0)} at ${lambda(at)}`)
    .join(", ");

/** A histogram of λ, and those of μ and ω if anybody asked for another than the default. */
function askedFor(view, release) {
  const shown = DIALS.filter(({ dial, preset }) => {
    const asked = view.window.dials[dial];
    return asked.length && (dial === "bias_removal" || asked.length > 1 || asked[0].at !== preset(release));
  });
  const host = byId("asked-charts");
  if (host.children.length !== shown.length) {
    host.replaceChildren(...shown.map(() => el("article", {}, el("h3"), el("div"), el("div"))));
  }
  shown.forEach(({ dial, symbol, preset }, i) => {
    histogram(host.children[i], view, symbol, view.window.dials[dial], preset(release));
  });
}

function histogram({ children: [heading, plot, alternative] }, view, symbol, asked, preset) {
  say(heading, `${symbol} asked for, ${view.words}`);
  const found = settings(asked);
  const shares = found.map(({ at, share }) => [at, share]).sort((a, b) => a[0] - b[0]);
  const ends = [...shares.map(([at]) => at), preset, 0, symbol === "λ" ? 1 : 0.5];
  const [from, to] = [Math.min(...ends) - 0.05, Math.max(...ends) + 0.05];
  chart(plot, {
    label: `Share of the queries by ${symbol}, ${view.words}; the table has the figures`,
    height: 130,
    lines: [{ kind: "calm", name: "queries", points: shares, bar: 0.05 }],
    marks: [{ at: preset, text: `default ${lambda(preset)}`, kind: "preset" }],
    x: { from, to, format: (at) => `${symbol} ${lambda(at)}`, ticks: (width) => lambdaTicks(from, to, width) },
    y: { max: found[0].share, ticks: 2, format: (share, exact) => percent(share, exact ? 1 : 0) },
  });
  dataTable(alternative, `${symbol} asked for as a table`, [symbol, "Share", "Queries"], () =>
    asked.map(({ at, queries }) => [lambda(at), percent(found.find((one) => one.at === at).share), count(queries)]),
  );
}
