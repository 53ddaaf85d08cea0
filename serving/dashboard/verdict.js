// The verdict, as the service gives it: the worst first, the rest below.

const WORDS = { act: "Act", watch: "Watch", unknown: "Too early", steady: "Steady" };
const SIGNALS = {
  label_log: "Labels",
  refused_release: "Release",
  engine: "Index",
  experiments: "Experiment",
  records: "Feedback",
  clock: "Clock",
  errors: "Errors",
  evaluation: "Release",
  unknown_ids: "Ids",
  restricted: "Filters",
  floors: "Floors",
  shed: "Load",
  organic_recall: "Recall",
  feedback_recall: "Recall",
  share_drift: "Shares",
  score_drift: "Scores",
  refresh: "Refresh",
  stale_release: "Training",
};

/** A sentence whose figures stay with their signs at the end of a line. */
const unbroken = (sentence) => sentence.replace(/(\d) (?=%)/g, "$1\u00a0").replace(/(PSI|λ|μ) (?=[\d−-])/g, "$1\u00a0");

function verdict({ data: { verdict: told, windows } }) {
  const { severity, headline, findings } = told;
  byId("severity").className = severity;
  say(byId("severity"), WORDS[severity]);
  byId("headline").replaceChildren(unbroken(headline));
  if (!windows["24h"].queries) byId("headline").append(" Send one to ", code("POST /v1/retrieve"), ".");
  // The headline is the worst finding's, unless all is well.
  byId("findings").replaceChildren(...findings.slice(1).map(finding));
}

function finding({ signal, bucket, severity, sentence, look_at: lookAt }) {
  return el(
    "li",
    {},
    el("span", { class: `severity ${severity}` }, WORDS[severity]),
    bucket ? nameOf(bucket) : el("span", { class: "signal" }, SIGNALS[signal] ?? signal),
    el("span", {}, unbroken(sentence), lookAt ? el("small", {}, ` Look at ${unbroken(lookAt)}.`) : null),
  );
}
