// A staged release beside the one that serves: what it would have answered to a share of the queries. Hidden without one.

async function staged({ staged: name }) {
  const found = name ? await call("/v1/release/staged").catch(() => null) : null;
  byId("staged").hidden = !found;
  if (!found) return;
  const { queries, refused, skipped, overlap } = found;
  say(byId("staged-lead"), besides(found));
  figures(byId("staged-figures"), [
    ["Queries mirrored", count(queries), skipped ? `${count(skipped)} more were left out, the mirror being busy` : ""],
    ["Refused", count(refused.queries), refused.reason],
    ["Overlap", percent(overlap), "of the labels served"],
  ]);
  table("staged-exposure", ["Served", "Staged", "Change"], BUCKETS, (kind) => {
    const { current, staged: its } = found.exposure[kind];
    return [percent(current), percent(its), points(known(its) && known(current) ? its - current : null)];
  });
  table("staged-recall", ["Served", "Staged", "Difference", "Choices"], KINDS, (kind) => {
    const { positives, staged: its, current, difference, interval } = found.organic_recall[kind];
    const bounds = interval && el("small", {}, ` ${signed(interval[0], 3)} to ${signed(interval[1], 3)}`);
    return [recall(current), recall(its), el("span", {}, signed(difference, 3), bounds), count(positives)];
  });
}

/** A row for each bucket. */
function table(id, columns, kinds, cells) {
  byId(id).replaceChildren(
    el("thead", {}, el("tr", {}, el("td"), ...columns.map((column) => el("th", { scope: "col" }, column)))),
    el(
      "tbody",
      {},
      ...kinds.map((kind) =>
        el("tr", {}, el("th", { scope: "row" }, nameOf(kind)), ...cells(kind).map((cell) => el("td", {}, cell))),
      ),
    ),
  );
}

const signed = (value, digits) => (known(value) ? `${value < 0 ? "" : "+"}${fixed(value, digits)}` : NONE);

/** In words: what is staged beside what, and whether its organic recall is another. */
function besides({ staged: name, current, queries, organic_recall: { all } }) {
  const beside = `${name} is asked beside ${current}, and nobody sees its answers.`;
  if (!queries) return `${beside} No query was mirrored yet.`;
  if (!all.positives) return `${beside} Its organic recall wants organic interactions.`;
  const [low, high] = all.interval;
  const size = `${signed(all.difference, 3)} (${signed(low, 3)} to ${signed(high, 3)})`;
  if (low > 0) return `${beside} Its organic recall is higher: ${size}.`;
  if (high < 0) return `${beside} Its organic recall is lower: ${size}.`;
  return `${beside} Its organic recall may be the same: ${size}.`;
}
