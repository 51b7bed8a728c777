// Charts in plain SVG. A chart fills its box; its texts keep their size.

import { clock, count, span } from "./format.js";
import { h } from "./dom.js";
import { lifecycle, stateOf } from "./words.js";

// -- over time -----------------------------------------------------------------------------------

const HEIGHT = 150;
const WIDTH = 600; // user units: the box is stretched, texts are HTML

/** Round up to 1, 2 or 5 times a power of ten. */
function nice(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

function frame({ label, top, points, unit, children, legend }) {
  const [first, last] = [points[0], points[points.length - 1]];
  return h(
    "figure",
    { class: "chart" },
    h(
      "div",
      { class: "plot" },
      h("div", { class: "y", "aria-hidden": "true" }, h("span", null, unit(top)), h("span", null, unit(top / 2)), h("span", null, "0")),
      h(
        "svg",
        { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
        [0, 0.5, 1].map((at) => h("line", { class: "grid", x1: 0, x2: WIDTH, y1: 0.5 + at * (HEIGHT - 1), y2: 0.5 + at * (HEIGHT - 1) })),
        children,
      ),
    ),
    h("div", { class: "x", "aria-hidden": "true" }, h("span", null, clock(first.at, { millis: false }).slice(0, -3)), h("span", null, clock(last.at, { millis: false }).slice(0, -3))),
    h("figcaption", null, legend),
  );
}

export function key(name, className, text, title) {
  return h("span", { class: "key", key: name, title }, h("span", { class: `swatch ${className}`, "aria-hidden": "true" }), text);
}

/** Bars that are stacked from parts: [{at, parts: {STATE: n}}]. */
export function stack(points, parts, { label, tip }) {
  const totals = points.map((point) => parts.reduce((sum, part) => sum + (point.parts[part] ?? 0), 0));
  const top = nice(Math.max(1, ...totals));
  const step = WIDTH / points.length;
  const used = parts.filter((part) => points.some((point) => point.parts[part]));
  return frame({
    label: `${label}. Highest: ${count(Math.max(...totals))}.`,
    top,
    points,
    unit: (value) => (Number.isInteger(value) ? count(value) : ""),
    legend: used.length ? used.map((part) => key(part, `state-${part}`, part, stateOf(part).meaning)) : h("span", { class: "soft" }, "Nothing in this time."),
    children: points.map((point, index) => {
      let below = 0;
      return h(
        "g",
        { key: index },
        h("rect", { class: "hit", x: index * step, y: 0, width: step, height: HEIGHT }, h("title", null, tip(point))),
        used.map((part) => {
          const height = ((point.parts[part] ?? 0) / top) * HEIGHT;
          below += height;
          return h("rect", { class: `bar state-${part}`, x: index * step + step * 0.08, y: HEIGHT - below, width: step * 0.84, height });
        }),
      );
    }),
  });
}

/** Lines: series are [{name, className, values}]; null is a gap. */
export function lines(points, series, { label, unit = span, tip }) {
  const values = series.flatMap((one) => one.values).filter((value) => value !== null);
  const top = values.length ? nice(Math.max(...values, 1e-3)) : 1;
  const step = points.length > 1 ? WIDTH / (points.length - 1) : WIDTH;
  const y = (value) => HEIGHT - (value / top) * (HEIGHT - 2) - 1;
  return frame({
    label,
    top,
    points,
    unit,
    legend: values.length ? series.map((one) => key(one.name, one.className, one.name, one.about)) : h("span", { class: "soft" }, "Nothing in this time."),
    children: [
      series.map((one) => h("path", { key: one.name, class: `line ${one.className}`, d: pathOf(one.values, step, y), "vector-effect": "non-scaling-stroke" })),
      points.map((point, index) =>
        h("rect", { key: index, class: "hit", x: (index - 0.5) * step, y: 0, width: step, height: HEIGHT }, h("title", null, tip(point, index)))),
    ],
  });
}

function pathOf(values, step, y) {
  let path = "";
  let pen = false;
  values.forEach((value, index) => {
    if (value === null) {
      pen = false;
      return;
    }
    // A single value between gaps is drawn as a dash.
    const alone = !pen && (index + 1 >= values.length || values[index + 1] === null);
    const x = index * step;
    const dash = Math.min(24, step * 0.6);
    path += alone ? `M${Math.min(x - dash / 2, WIDTH - dash)} ${y(value)}h${dash}` : `${pen ? "L" : "M"}${x} ${y(value)}`;
    pen = true;
  });
  return path;
}

// -- a lifecycle ---------------------------------------------------------------------------------

const BOX = { height: 40, gap: 40, rows: 118, arc: 16 };

/**
 * A lifecycle's diagram: unfinished states in a row, ends below. `visited` has what happened by
 * state: {note, title}; `travelled` the moves that were made, as "BEFORE>AFTER".
 */
export function diagram(name, { visited = {}, travelled = new Set(), current, label }) {
  const table = lifecycle(name);
  const moves = new Map();
  for (const [before, , after] of table.moves) if (before !== after) moves.set(`${before}>${after}`, [before, after]);
  const used = new Set([...moves.values()].flat());
  const states = Object.entries(table.states).filter(([state]) => used.has(state));
  const open = states.filter(([, one]) => !one.final).map(([state]) => state);
  const ends = states.filter(([, one]) => one.final).map(([state]) => state);
  const columns = Math.max(open.length, ends.length, 3);
  const box = Math.max(112, ...states.map(([state]) => state.length * 9 + 12));
  const width = columns * box + (columns - 1) * BOX.gap + 4;
  const farthest = Math.max(...[...moves.values()].map(([before, after]) => leap(open.indexOf(before), open.indexOf(after))));
  const top = 2 + farthest * BOX.arc;
  const height = top + BOX.rows + BOX.height + 2;
  const place = {};
  const put = (row, y) => {
    const gap = row.length > 1 ? (width - 4 - row.length * box) / (row.length - 1) : 0;
    const first = row.length > 1 ? 2 : (width - box) / 2;
    row.forEach((state, index) => (place[state] = { x: first + index * (box + gap), y, index, width: box }));
  };
  put(open, top);
  // Each end below the states that lead to it, so that few lines cross.
  const middle = (end) => {
    const from = [...moves.values()].filter(([, after]) => after === end).map(([before]) => place[before]?.x ?? 0);
    return from.reduce((sum, x) => sum + x, 0) / from.length;
  };
  put([...ends].sort((a, b) => middle(a) - middle(b)), top + BOX.rows);
  const sorted = [...moves].sort(([a], [b]) => travelled.has(a) - travelled.has(b));
  const way = states.map(([state]) => state).filter((state) => visited[state]).join(", ");
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": `Diagram of the ${table.name}`, ref: (box) => requestAnimationFrame(() => (box.scrollLeft = (place[current]?.x ?? 0) - 100)) },
    h(
      "svg",
      { class: "diagram", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label ?? `The states of a ${table.name}; this one was in: ${way}` },
      h("defs", null, ["arrow", "arrow-on"].map((id) =>
        h("marker", { id: `${name}-${id}`, key: id, class: id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, h("path", { d: "M0 0 8 4 0 8z" })))),
      sorted.map(([move, [before, after]]) => {
        const on = travelled.has(move);
        return h("path", { key: move, class: on ? "edge on" : "edge", d: edge(place[before], place[after]), "marker-end": `url(#${name}-${on ? "arrow-on" : "arrow"})` });
      }),
      states.map(([state, { meaning }]) => {
        const at = place[state];
        const was = visited[state];
        return h(
          "g",
          { key: state, class: `node state-${stateOf(state, name).name} ${was ? "on" : ""} ${state === current ? "current" : ""}`, transform: `translate(${at.x} ${at.y})` },
          h("title", null, was?.title ? `${meaning}\n${was.title}` : meaning),
          h("rect", { width: box, height: BOX.height, rx: 6 }),
          h("text", { x: box / 2, y: was?.note ? 17 : 24 }, state),
          was?.note ? h("text", { class: "note", x: box / 2, y: 32 }, was.note) : null,
        );
      }),
    ),
  );
}

/** How far a move goes within the row, if not to the next state: it is drawn above the row. */
function leap(from, to) {
  return from < 0 || to < 0 || to - from === 1 ? 0 : Math.abs(to - from);
}

function edge(from, to) {
  const far = from.y === to.y ? leap(from.index, to.index) : 0;
  if (far) {
    const side = to.index > from.index ? 0.66 : 0.34; // there and back are two lines
    const [x1, x2] = [from.x + from.width * side, to.x + to.width * (1 - side)];
    const peak = from.y - far * BOX.arc * 1.3;
    return `M${x1} ${from.y}C${x1} ${peak} ${x2} ${peak} ${x2} ${from.y}`;
  }
  if (from.y === to.y) return `M${from.x + from.width} ${from.y + BOX.height / 2}H${to.x}`;
  const [x1, x2] = [from.x + from.width / 2, to.x + to.width / 2];
  const [y1, y2] = [from.y + BOX.height, to.y];
  const bend = (y2 - y1) / 2;
  return `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`;
}

// -- a waterfall ---------------------------------------------------------------------------------

/** Rows of bars on one time axis: [{label, depth, parts: [{from, to, state, title}]}]. */
export function waterfall(rows, now) {
  const times = rows.flatMap((row) => row.parts.flatMap((part) => [part.from, part.to ?? now]));
  const first = Math.min(...times);
  const whole = Math.max(...times) - first || 1e-6;
  const x = (at) => `${((at - first) / whole) * 100}%`;
  return h(
    "div",
    { class: "waterfall" },
    rows.map((row, index) =>
      h(
        "div",
        { class: "row", key: row.key ?? index },
        h("div", { class: `label depth-${row.depth ?? 0}` }, row.label),
        h(
          "svg",
          { class: "bars", role: "img", "aria-label": row.parts.map((part) => part.title).join("; ") },
          row.parts.map((part, at) => {
            const to = part.to ?? now;
            return h("rect", { key: at, class: `bar state-${part.state}`, x: x(part.from), width: `${Math.max(0.3, ((to - part.from) / whole) * 100)}%`, y: 4, height: 14, rx: 2 }, h("title", null, part.title));
          }),
        ),
        h("div", { class: "took" }, row.took ?? span(Math.max(...row.parts.map((part) => part.to ?? now)) - Math.min(...row.parts.map((part) => part.from)))),
      ),
    ),
    h("div", { class: "row axis", "aria-hidden": "true" }, h("div", { class: "label" }), h("div", { class: "scale" }, h("span", null, "0"), h("span", null, span(whole))), h("div", { class: "took" })),
  );
}
