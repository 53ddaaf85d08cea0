// The page's life: ask every five seconds while somebody looks, say what state the service is in, draw.

const EVERY = 5000;
const KEY = "longtail-key";
const TITLE = "Longtail";
const state = { data: null, release: null, unready: null, answered: 0, timer: 0, polling: false, again: false };

class Refused extends Error {
  constructor(status, message, type) {
    super(message);
    this.status = status;
    this.type = type;
  }
}

/** Asks the service; GET, or POST where there is a body. Throws Refused with the service's own words. */
async function call(path, body) {
  const key = sessionStorage.getItem(KEY);
  const headers = { Accept: "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const posted = body && { method: "POST", body: JSON.stringify(body) };
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { ...posted, headers, cache: "no-store", signal: AbortSignal.timeout(10000) });
  } catch {
    throw new Refused(0, "The service cannot be reached.");
  }
  const answer = await response.json().catch(() => null);
  if (response.ok && answer) return answer;
  const error = answer?.error;
  if (!error) throw new Refused(response.status, `The service answered ${response.status} without a reason.`);
  throw new Refused(response.status, error.field ? `${error.field}: ${error.message}` : error.message, error.type);
}

async function poll() {
  clearTimeout(state.timer);
  state.again = state.polling;
  if (document.hidden || state.polling) return;
  state.polling = true;
  try {
    const [unready, data] = await Promise.all([
      call("/readyz").then(
        () => "",
        (error) => error.message,
      ),
      call("/v1/monitoring"),
    ]);
    if (state.release?.name !== data.release) state.release = await call("/v1/release?include=curve");
    Object.assign(state, { unready, data, answered: Date.now() });
    report();
    render();
    prepareQuery(state.release);
    staged(data);
  } catch (error) {
    if (!(error instanceof Refused)) console.error(error);
    report(error);
  } finally {
    state.polling = false;
    state.timer = setTimeout(poll, state.again ? 0 : EVERY);
  }
}

/** The status line, the banner and the key's field, for the last answer or the error that came instead. */
function report(error) {
  const [kind, word, banner] = condition(error);
  byId("state").className = kind;
  say(byId("state"), word);
  say(
    byId("banner"),
    banner && state.answered && error ? `${banner} The figures below are of ${clockSeconds(state.answered)}.` : banner,
  );
  document.body.classList.toggle("stale", error !== undefined);
  const severity = state.data?.verdict.severity;
  const alarm = kind === "ready" && ["act", "watch"].includes(severity) ? WORDS[severity] : word;
  document.title = alarm === "Ready" ? TITLE : `${alarm} · ${TITLE}`;
  byId("main").classList.toggle("without", !state.data);
  byId("forget").hidden = kind === "refused" || !sessionStorage.getItem(KEY);
  const shown = !byId("key").hidden;
  byId("key").hidden = kind !== "refused" && !(shown && error?.status === 0);
  if (!shown && !byId("key").hidden) byId("key-field").focus();
}

/** [class, word, banner] of the status line. */
function condition(error) {
  if (error === undefined) {
    if (!state.unready) return ["ready", "Ready", ""];
    return ["waiting", "Not ready", `The service answers, but takes no queries: ${state.unready}.`];
  }
  switch (error.status) {
    case 0:
      return ["lost", "Unreachable", `${error.message} Trying again every ${EVERY / 1000} seconds.`];
    case 401: {
      const keyed = sessionStorage.getItem(KEY) !== null;
      return [
        "refused",
        "Key needed",
        keyed ? "The service does not know this API key." : "The service wants an API key.",
      ];
    }
    case 503: {
      const hint = error.type === "not_ready" ? " Publish a release, or wait for the one that is loading." : "";
      return ["waiting", "Not ready", `${error.message}.${hint}`];
    }
    default:
      return ["lost", "In trouble", error.message];
  }
}

/** What one drawing needs: the answer, the chosen window and its steps. */
function viewOf(data) {
  const chosen = document.querySelector("#window input:checked").value;
  const span = SPANS[chosen];
  const now = Date.parse(data.now);
  const shown = shownOf(data, now, span);
  return { data, now, span, words: span.name, window: data.windows[chosen], steps: steps(data.series, shown), ...shown };
}

function render() {
  if (!state.data) return;
  const view = viewOf(state.data);
  say(byId("release"), state.data.release);
  say(byId("model"), `${state.release.model}, ${plural(state.release.labels, "label")}`);
  say(byId("since"), `${moment(state.data.since)}, ${duration(view.now - Date.parse(state.data.since))}`);
  say(byId("updated"), clockSeconds(state.answered));
  verdict(view);
  shares(view);
  recalls(view);
  askedFor(view, state.release);
  dial(view, state.release);
  load(view);
  releases(view);
}

say(byId("title"), TITLE);
byId("window").addEventListener("change", render);
document.addEventListener("visibilitychange", poll);
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key-field").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    say(byId("banner"), "A key is made of letters, digits and signs, without spaces.");
    return;
  }
  sessionStorage.setItem(KEY, key);
  byId("key-field").value = "";
  poll();
});
byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  poll();
});
poll();
