// The query box: one request asks at the form's λ, μ and ω and at the defaults, so that each label's move can be shown.

const PAUSE = 120; // ms without a change before the service is asked
const REST = 800; // ms without a change before it is asked to explain, which takes some hundred searches
const EXPLAINED = 50; // labels that it explains, at most
const asked = { sent: 0, shown: 0, timer: 0, release: null, failed: false };

/** Prepares the box for a release: its example, unless the operator wrote something, and its ranges of λ, μ and ω. */
function prepareQuery(release) {
  if (asked.release?.name === release.name) {
    if (asked.failed) ask();
    return;
  }
  const { minimum, maximum, default: preset } = release.bias_removal;
  const [features, slider] = [byId("features"), byId("lambda")];
  if (!asked.release || features.value === exampleOf(asked.release)) features.value = exampleOf(release);
  const untouched = !asked.release || Number(slider.value) === asked.release.bias_removal.default;
  Object.assign(slider, { min: minimum, max: maximum });
  if (untouched) slider.value = preset;
  const mu = byId("mu");
  if (!asked.release || Number(mu.value) === asked.release.popularity.default) mu.value = release.popularity.default;
  Object.assign(mu, { min: release.popularity.minimum, max: release.popularity.maximum });
  const omega = byId("omega");
  byId("omega-field").hidden = !release.cooccurrence;
  if (release.cooccurrence) {
    const { minimum, maximum, default: preset } = release.cooccurrence;
    const untouched = !asked.release?.cooccurrence || Number(omega.value) === asked.release.cooccurrence.default;
    Object.assign(omega, { min: minimum, max: maximum });
    if (untouched) omega.value = preset;
  }
  asked.release = release;
  drawScale(release.bias_removal);
  ask();
}

/** The example with a line for each feature. */
function exampleOf({ example }) {
  const lines = Object.entries(example).map(
    ([feature, value]) => `  ${JSON.stringify(feature)}: ${JSON.stringify(value)}`,
  );
  return `{\n${lines.join(",\n")}\n}`;
}

function drawScale({ minimum, maximum, default: preset }) {
  const mark = el("span", { class: "at" }, `default ${short(preset)}`);
  const share = (preset - minimum) / (maximum - minimum);
  mark.style.left = `${100 * share}%`;
  mark.style.translate = `${-100 * share}%`;
  byId("lambda-scale").replaceChildren(
    el("span", {}, `${short(minimum)} tail`),
    el("span", {}, `${short(maximum)} head`),
    mark,
  );
}

function sayDials() {
  for (const name of ["lambda", "omega"]) say(byId(`${name}-value`), lambda(Number(byId(name).value)));
}

/** Asks once typing or sliding has paused. */
function askSoon() {
  sayDials();
  clearTimeout(asked.timer);
  asked.timer = setTimeout(ask, PAUSE);
}

/** What the form says, or an Error for the operator. */
function queries() {
  let features;
  try {
    features = JSON.parse(byId("features").value);
  } catch (error) {
    throw new Error(`Features: expected JSON. ${error.message}`);
  }
  if (features === null || typeof features !== "object" || Array.isArray(features))
    throw new Error('Features: expected an object such as {"user_id": "u42"}.');
  const k = Number(byId("k").value);
  if (!Number.isInteger(k) || k < 1)
    throw new Error(`k: expected a whole number from 1, received "${byId("k").value}".`);
  const λ = Number(byId("lambda").value);
  const μ = Number(byId("mu").value);
  const ω = Number(byId("omega").value);
  const { bias_removal, popularity, cooccurrence } = asked.release;
  const preset = { features, k, bias_removal: bias_removal.default };
  const moved = {};
  if (λ !== bias_removal.default) moved.bias_removal = λ;
  if (μ !== popularity.default) moved.popularity = μ;
  if (cooccurrence && ω !== cooccurrence.default) moved.cooccurrence = ω;
  return Object.keys(moved).length ? [{ ...preset, ...moved }, preset] : [preset];
}

async function ask(explain = false) {
  clearTimeout(asked.timer);
  sayDials();
  if (!asked.release) return;
  const turn = ++asked.sent;
  try {
    const [first, ...rest] = queries();
    const answer = await call("/v1/retrieve", { queries: [explain ? { ...first, explain } : first, ...rest], preview: true });
    if (turn < asked.shown) return; // a later question was answered before
    if (!explain && first.k <= EXPLAINED) asked.timer = setTimeout(() => ask(true), REST);
    Object.assign(asked, { shown: turn, failed: false });
    askError("");
    showAnswer(answer);
  } catch (error) {
    if (turn < asked.shown) return;
    Object.assign(asked, { shown: turn, failed: [0, 401, 503].includes(error.status) }); // the next poll asks again
    askError(error.status === 401 ? "The service wants an API key; give it above." : error.message);
  }
}

function askError(text) {
  say(byId("ask-error"), text);
  byId("features").setAttribute("aria-invalid", text.startsWith("Features"));
  byId("answer").classList.toggle("old", text !== "");
}

/** The column to call a label by, and the rest of its columns, with names where a value says little. */
function titled({ id, display }) {
  const columns = Object.entries(display ?? {}).filter(([, value]) => value !== null && value !== "");
  const title =
    columns.find(([column]) => /^(title|name)$/i.test(column)) ??
    columns.find(([, value]) => typeof value === "string");
  const rest = columns.filter((column) => column !== title).map(([name, value]) => (typeof value === "string" ? value : `${name}: ${written(value)}`));
  return { title: title ? String(title[1]) : id, rest: [title ? id : "", ...rest].filter(Boolean).join(" · ") };
}

function written(value) {
  if (Array.isArray(value)) return value.map(written).join(", ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** How far a label came against the defaults. */
function move(rank, before) {
  if (before < 0) return el("span", { class: "move new" }, "new");
  if (before === rank) return el("span", { class: "move" });
  const by = Math.abs(before - rank);
  const [arrow, word] = before > rank ? ["▲", "up "] : ["▼", "down "];
  return el(
    "span",
    { class: "move" },
    el("span", { "aria-hidden": "true" }, arrow),
    el("span", { class: "hidden" }, word),
    `${by}`,
  );
}

/** Where on the dial a label is in the answer, and what its score is made of, in words. */
function reason({ explanation }) {
  if (!explanation) return "";
  const parts = [["taste", "taste"], ["bias", "bias"], ["noise", "λ·log ν"], ["popularity", "μ·log π"], ["cooccurrence", "ω·c"]]
    .filter(([part]) => explanation[part])
    .map(([part, word]) => `${word} ${fixed(explanation[part], 2)}`);
  for (const [prior, part] of Object.entries(explanation.priors ?? {})) if (part) parts.push(`${prior} ${fixed(part, 2)}`);
  const [low, high] = explanation.bias_removal ?? [];
  const within = explanation.bias_removal ? `In the answer from λ ${lambda(low)} to ${lambda(high)}: ` : "Not by score: ";
  return within + parts.join(", ");
}

/** The λ at which a label is in the answer, as a bar over the dial's range, with the λ of the query. */
function stays(label, λ) {
  const { explanation, bucket } = label;
  if (!explanation) return null;
  const { minimum, maximum } = asked.release.bias_removal;
  const at = (place) => (100 * (place - minimum)) / (maximum - minimum);
  const [low, high] = explanation.bias_removal ?? [λ, λ];
  return svg(
    "svg",
    {
      class: `stays ${bucket}`, viewBox: "0 0 100 4", preserveAspectRatio: "none", role: "img",
      "aria-label": reason(label),
    },
    svg("rect", { class: "whole", x: "0", y: "1.5", width: "100", height: "1" }),
    svg("rect", { class: "bar", x: `${at(low)}`, y: "1", width: `${Math.max(at(high) - at(low), 0.5)}`, height: "2" }),
    svg("rect", { class: "here", x: `${at(λ) - 0.25}`, y: "0", width: "0.5", height: "4" }),
  );
}

const dials = ({ bias_removal, popularity, cooccurrence }) =>
  lambda(bias_removal) +
  (popularity ? `, μ ${lambda(popularity)}` : "") +
  (cooccurrence ? `, ω ${lambda(cooccurrence)}` : "");

/** The entries of the query's history behind a label, largest share first. */
function because({ explanation }) {
  const ids = (explanation?.because ?? []).map(({ id }) => id);
  return ids.length ? el("small", { class: "because" }, `· because of ${ids.join(", ")}`) : null;
}

function showAnswer({ results: [result, preset] }) {
  const { labels } = result;
  const before = new Map((preset?.labels ?? labels).map(({ id }, rank) => [id, rank]));
  const parts = BUCKETS.map((bucket) => `${labels.filter((label) => label.bucket === bucket).length} ${bucket}`);
  const moves = preset ? `; moves against the default, ${dials(preset)}` : ", the default";
  const summary = `${parts.join(" · ")} at λ ${dials(result)}${moves}`;
  const { query, history } = result.unknown;
  const counted = [query && plural(query, "id of the features", "ids of the features"), history && plural(history, "entry of the history", "entries of the history")].filter(Boolean);
  const strangers = counted.length ? ` Unknown to this release: ${counted.join(", ")}.` : "";
  say(byId("answer-summary"), (labels.length ? summary : "No label is eligible for this query.") + strangers);
  const { minimum, maximum } = asked.release.bias_removal;
  const barNote = byId("bar-note");
  barNote.hidden = !labels.some(({ explanation }) => explanation);
  say(
    barNote,
    `Bar, from λ ${short(minimum)} to ${short(maximum)}: where the label is among these ${labels.length}; mark: your λ. ` +
      "Point at a label to see what its score is made of.",
  );
  byId("strip").replaceChildren(...labels.map(({ bucket }) => el("i", { class: bucket })));
  byId("results").replaceChildren(
    ...labels.map((label, rank) => {
      const { title, rest } = titled(label);
      return el(
        "li",
        { title: reason(label) },
        el("span", { class: "rank" }, String(rank + 1)),
        move(rank, before.get(label.id) ?? -1),
        el("span", { class: "what" }, el("b", {}, title), " ", rest ? el("small", {}, rest) : null, " ", because(label)),
        el("span", { class: `name ${label.bucket}` }, label.bucket),
        el("span", { class: "score" }, fixed(label.score, 2)),
        stays(label, result.bias_removal),
      );
    }),
  );
}

byId("features").addEventListener("input", askSoon);
byId("lambda").addEventListener("input", askSoon);
byId("mu").addEventListener("input", askSoon);
byId("omega").addEventListener("input", askSoon);
byId("k").addEventListener("input", askSoon);
byId("default").addEventListener("click", () => {
  if (asked.release) {
    byId("lambda").value = asked.release.bias_removal.default;
    byId("mu").value = asked.release.popularity.default;
    if (asked.release.cooccurrence) byId("omega").value = asked.release.cooccurrence.default;
  }
  ask();
});
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
