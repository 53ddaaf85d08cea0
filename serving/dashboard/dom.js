// Elements. Text only ever arrives as text nodes: nothing on this page is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (known(value) || value) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element: name, attributes (null and "" are left out), children (strings become text). */
const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

/** Sets text only where it changed, so that live regions stay quiet. */
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Replaces the entries of a <dl class="figures">: [name, figure, note?] each. */
function figures(list, entries) {
  list.replaceChildren(
    ...entries.map(([name, figure, note]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, figure, note ? el("small", {}, ` ${note}`) : null)),
    ),
  );
}

/** Fills a table under a summary, drawn only while it is open: a chart's text alternative. `rows` is called then. */
function dataTable(host, title, columns, rows) {
  let details = host.querySelector("details");
  if (!details) {
    details = el(
      "details",
      {},
      el("summary", {}, title),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }),
    );
    details.addEventListener("toggle", () => details.draw());
    host.append(details);
  }
  details.draw = () => {
    if (!details.open) return;
    const head = el("tr", {}, ...columns.map((column) => el("th", { scope: "col" }, column)));
    const body = rows().map(([first, ...rest]) =>
      el("tr", {}, el("th", { scope: "row" }, first), ...rest.map((cell) => el("td", {}, cell))),
    );
    details.lastElementChild.replaceChildren(el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
  };
  details.draw();
}
