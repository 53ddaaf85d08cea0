// One line chart, drawn at the size it has on the screen, so that its text is never scaled.

const ROW = 13; // height of a line of its text
const LEFT = 42; // room for the figures of the vertical axis, more if they are long
const pen = document.createElement("canvas").getContext("2d");
pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
const widthOf = (text) => pen.measureText(text).width;

/** Round numbers from 0 to at least `top`, in about `wanted` steps. */
function scale(top, wanted) {
  const raw = (top || 1) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => raw <= factor * power * 1.0001);
  return Array.from({ length: Math.ceil(top / step - 1e-9) + 1 || 2 }, (_, i) => i * step);
}

/** Times on the hour, or a round part of it, that leave each label room: [[time, text]]. */
function timeTicks(from, to, width) {
  const fits = (minutes) => (to - from) / MINUTE / minutes <= Math.max(2, width / 64);
  const step = MINUTE * ([1, 2, 5, 10, 15, 30, 60, 120, 180, 240, 360].find(fits) ?? 720);
  const zone = new Date(to).getTimezoneOffset() * MINUTE;
  const ticks = [];
  for (let at = Math.ceil((from - zone) / step) * step + zone; at <= to; at += step) ticks.push([at, clock(at)]);
  return ticks;
}

/** Gives texts one of two rows where they do not touch; a text without room gets row −1, its mark stays. */
function place(marks, right) {
  const ends = [-Infinity, -Infinity];
  return marks.map((mark) => {
    const width = widthOf(mark.text ?? "");
    const before = mark.x + 4 + width > right;
    const start = before ? mark.x - 4 - width : mark.x + 4;
    const row = mark.text && start >= 8 ? ends.findIndex((end) => end + 8 < start) : -1;
    if (row >= 0) ends[row] = start + width;
    return { ...mark, row, before };
  });
}

/** Moves labels apart until none overlaps: each gets a `y` as near to its `wish` as its neighbours allow. */
function spread(labels, top, bottom) {
  labels.sort((a, b) => a.wish - b.wish);
  labels.forEach((label, i) => (label.y = Math.max(label.wish, i ? labels[i - 1].y + ROW : top)));
  for (let i = labels.length - 1, floor = bottom; i >= 0; i--, floor = labels[i + 1].y - ROW) {
    labels[i].y = Math.min(labels[i].y, floor);
  }
  return labels;
}

/** The stretches of a line without a hole: all known, neighbours no further apart than `gap`. */
function runs(points, gap = Infinity) {
  const found = [[]];
  for (const point of points) {
    const last = found.at(-1).at(-1);
    if (!known(point[1]) || (last && point[0] - last[0] > gap)) found.push([]);
    if (known(point[1])) found.at(-1).push(point);
  }
  return found.filter((run) => run.length);
}

const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => draw(target)));

/**
 * Draws a chart into `host`, and again whenever its width changes.
 * @param {object} spec
 *   label: what a screen reader says; height in px;
 *   x: {from, to, ticks(width) → [[at, text]] or null, format}; y: {max, ticks: about how many, format(value, exact)};
 *   lines: [{kind, name, end?: label at its end, bar?: width of bars instead of a line, points: [[x, y|null]], band?: [[x, low, high]]}];
 *   gap: longest hole that a line bridges; marks: [{at, text?, kind}] vertical; levels: [{at, text, kind}] horizontal;
 *   shade: [from, to]; margin: a text that fits on the right, where the lines have no labels.
 */
function chart(host, spec) {
  if (!host.spec) {
    host.classList.add("chart");
    host.addEventListener("pointermove", (event) => inspect(host, event.clientX));
    host.addEventListener("pointerleave", () => inspect(host, null));
    sizes.observe(host);
  }
  host.spec = spec;
  draw(host);
}

function draw(host) {
  const { spec, clientWidth: width } = host;
  if (!width) return;
  const plot = geometry(spec, width);
  const root = svg("svg", { width, height: spec.height, role: "img", "aria-label": spec.label });
  root.append(...axes(spec, plot), ...lines(spec, plot), ...marks(plot), ...labels(spec, plot));
  host.plot = plot;
  host.replaceChildren(root);
  if (known(host.pointer)) inspect(host, host.pointer);
}

/** Where things go: the edges of the plot, x and y in px of a point, the ticks, and the marks with their rows. */
function geometry(spec, width) {
  const right =
    width - 10 - Math.max(...[spec.margin, ...spec.lines.map(({ end }) => end)].map((text) => widthOf(text ?? "")));
  const ticks = scale(spec.y.max, spec.y.ticks);
  const left = Math.max(LEFT, 6 + Math.max(...ticks.map((tick) => widthOf(spec.y.format(tick)))));
  const x = (at) => left + ((at - spec.x.from) / (spec.x.to - spec.x.from)) * (right - left);
  const placed = (spec.marks ?? []).map((mark) => ({ ...mark, x: x(mark.at) })).sort((a, b) => a.x - b.x);
  const marks = place(placed, right);
  const top = 6 + ROW * (1 + Math.max(-1, ...marks.map(({ row }) => row)));
  const bottom = spec.height - (spec.x.ticks ? 20 : 6);
  const y = (value) => bottom - (value / ticks.at(-1)) * (bottom - top);
  return { left, right, top, bottom, x, y, ticks, marks };
}

const path = ({ x, y }, points) =>
  points.map(([at, value], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");

const rule = (kind, x1, y1, x2, y2) => svg("line", { class: kind, x1, y1, x2, y2 });

function axes(spec, { left, right, top, bottom, x, y, ticks }) {
  const drawn = [];
  if (spec.shade) {
    const [from, to] = spec.shade.map(x);
    drawn.push(svg("rect", { class: "shade", x: from, y: top, width: to - from, height: bottom - top }));
  }
  for (const tick of ticks) {
    drawn.push(rule(tick ? "grid" : "axis", left, y(tick), right, y(tick)));
    drawn.push(svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, spec.y.format(tick)));
  }
  for (const [at, text] of spec.x.ticks?.(right - left) ?? []) {
    drawn.push(rule("axis", x(at), bottom, x(at), bottom + 3));
    drawn.push(svg("text", { x: x(at), y: bottom + 15, "text-anchor": "middle" }, text));
  }
  for (const { at, kind } of spec.levels ?? []) drawn.push(rule(`level ${kind}`, left, y(at), right, y(at)));
  return drawn;
}

function lines(spec, plot) {
  const band = ({ band: points, kind }) => {
    const high = points.map(([at, , value]) => [at, value]);
    const low = points.map(([at, value]) => [at, value]).reverse();
    return svg("path", { class: `band ${kind}`, d: `${path(plot, [...high, ...low])}Z` });
  };
  const stroke = (kind, run) =>
    run.length > 1
      ? svg("path", { class: `line ${kind}`, d: path(plot, run) })
      : svg("circle", { class: `dot ${kind}`, cx: plot.x(run[0][0]), cy: plot.y(run[0][1]), r: 2.4 });
  return [
    ...spec.lines.filter((line) => line.band).map(band),
    ...spec.lines.flatMap((line) => (line.bar ? bars(line, plot) : [])),
    ...spec.lines
      .filter((line) => !line.bar)
      .flatMap(({ kind, points }) => runs(points, spec.gap).map((run) => stroke(kind, run))),
  ];
}

/** A line as bars, as wide as `bar` on the horizontal axis. */
function bars({ kind, points, bar }, { x, y, bottom }) {
  const width = Math.max(3, x(bar) - x(0) - 1);
  return points.map(([at, value]) => {
    const height = Math.max(1, bottom - y(value));
    return svg("rect", { class: `bar ${kind}`, x: x(at) - width / 2, y: bottom - height, width, height });
  });
}

function marks({ marks: placed, top, bottom }) {
  const strokes = placed.map(({ kind, x, row }) => rule(`mark ${kind}`, x, row < 0 ? top : 2 + ROW * row, x, bottom));
  const texts = placed
    .filter(({ row }) => row >= 0)
    .map(({ kind, x, row, before, text }) => {
      const at = { x: x + (before ? -4 : 4), y: ROW * (row + 1) - 2, "text-anchor": before ? "end" : "start" };
      return svg("text", { class: `mark ${kind}`, ...at }, text);
    });
  return [...strokes, ...texts];
}

function labels(spec, { right, top, bottom, y }) {
  const wanted = (spec.levels ?? []).map(({ at, kind, text }) => ({ wish: y(at) + 4, kind, text }));
  for (const { kind, end, points } of spec.lines) {
    const last = points.findLast(([, value]) => known(value));
    if (end && last) wanted.push({ wish: y(last[1]) + 4, kind, text: end });
  }
  const at = spread(wanted, top + 4, bottom + 4);
  return at.map((label) => svg("text", { class: `end ${label.kind}`, x: right + 6, y: label.y }, label.text));
}

/** Reads the chart off at the pointer: a hairline, the point on every line, the figures above. */
function inspect(host, clientX) {
  host.pointer = clientX;
  host.querySelector(".cursor")?.remove();
  const { spec, plot } = host;
  const all = spec.lines.flatMap(({ points }) => points.filter(([, value]) => known(value)).map(([at]) => at));
  if (!known(clientX) || !all.length || !plot) return;
  const wanted = clientX - host.getBoundingClientRect().left;
  const distance = (at) => Math.abs(plot.x(at) - wanted);
  const at = all.reduce((best, other) => (distance(other) < distance(best) ? other : best));
  const there = spec.lines
    .map((line) => ({ ...line, value: line.points.find((point) => point[0] === at)?.[1] }))
    .filter(({ value }) => known(value));
  const read = there.map(({ name, value }) => `${name} ${spec.y.format(value, true)}`);
  const text = [spec.x.format(at), ...read].join("   ");
  const width = widthOf(text);
  const start = Math.max(8, Math.min(plot.x(at) - width / 2, plot.right - width));
  host.firstElementChild.append(
    svg(
      "g",
      { class: "cursor" },
      rule("", plot.x(at), plot.top, plot.x(at), plot.bottom),
      ...there.map(({ kind, value }) =>
        svg("circle", { class: `dot ${kind}`, cx: plot.x(at), cy: plot.y(value), r: 3 }),
      ),
      svg("rect", { x: start - 4, y: 0, width: width + 8, height: ROW + 3 }),
      svg("text", { x: start, y: ROW - 2 }, text),
    ),
  );
}
