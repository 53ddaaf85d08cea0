// The experiment that runs: its arms beside each other, and whether a difference is real. Hidden where there is none.

const hits = (value) => (known(value) ? `${value < 0 ? "" : "+"}${fixed(value, 4)}` : NONE);
const between = ({ low, high }, figure) => (known(low) ? el("small", {}, ` ${figure(low)} to ${figure(high)}`) : null);

async function experiments() {
  const found = await call("/v1/experiments").catch(() => null);
  if (!found) return;
  const { experiment, refused } = found;
  byId("experiment").hidden = !experiment && !refused;
  byId("experiment-refused").hidden = !refused;
  say(byId("experiment-refused"), refused ? `experiments.toml is refused, the one before is in force: ${refused}` : "");
  const shown = experiment ? [experiment] : [];
  byId("arms").replaceChildren(...shown.flatMap(armsTable));
  say(byId("experiment-lead"), shown.map(outcome).join(""));
  say(byId("experiment-note"), shown.map(footnote).join(""));
}

/** In words: which arm differs from the first, by how much, and what cannot be trusted. */
function outcome({ name, arms: [control, ...others], sample_ratio: ratio }) {
  if (ratio.mismatch) return `${name}: units are not divided by the shares. Do not trust the comparison before you know why.`;
  const told = others.map(({ name: arm, difference }) => {
    if (!difference) return `${arm} has no answers yet to compare`;
    const size = `${hits(difference.value)} hits per answer beside ${control.name}`;
    return difference.real ? `${arm} brings ${size}, and that is real` : `${arm} brings ${size}, which may be chance yet`;
  });
  return `${name}: ${told.join("; ")}.`;
}

function footnote({ run, since, traffic, confidence }) {
  const begun = since ? ` since ${moment(since)}` : "";
  const bounds = `Bounds hold at every look, all looks together with ${percent(confidence, 0)}.`;
  return `Run ${run}${begun}, ${percent(traffic, 0)} of the units. ${bounds}`;
}

function armsTable({ arms }) {
  const columns = ["Arm", "Units", "Answers", ...BUCKETS.map((bucket) => NAMES[bucket]), "Recall", "Hits per answer", "Difference"];
  const row = (arm) => {
    const { name, share, units, answers, exposures, recall: recalled, hits_per_answer: per, difference, unavailable } = arm;
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, name, el("small", {}, ` ${percent(share, 0)}${unavailable ? `, default: ${unavailable}` : ""}`)),
      el("td", {}, count(units)),
      el("td", {}, count(answers)),
      ...BUCKETS.map((bucket) => el("td", {}, percent(exposures[bucket].share))),
      el("td", {}, recall(recalled.all.value), between(recalled.all, recall)),
      el("td", {}, fixed(per.value, 4), between(per, (value) => fixed(value, 4))),
      el("td", {}, difference ? hits(difference.value) : "", difference ? between(difference, hits) : null),
    );
  };
  return [
    el("thead", {}, el("tr", {}, ...columns.map((column) => el("th", { scope: "col" }, column)))),
    el("tbody", {}, ...arms.map(row)),
  ];
}
