"use strict";
/* Small drawings of curves, as SVG in the page's own colours. */

const SVG = "http://www.w3.org/2000/svg";
const SIZE = { width: 300, height: 130, left: 38, right: 6, top: 8, bottom: 20 };

function shape(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.append(text);
  return node;
}

function short(value) {
  return value === null || value === undefined ? "" : String(Number(value.toPrecision(3)));
}

/* The least and the largest of the values, apart where they are equal. */
function span(values) {
  const low = Math.min(...values), high = Math.max(...values);
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

function curve(curve, letters) {
  const points = Object.values(curve.runs).flat();
  const [x0, x1] = span(points.map((point) => point[0]));
  const isRate = points.every((point) => point.length === 4);
  const [y0, y1] = isRate ? [0, 1] : span(points.map((point) => point[1]));
  const x = (value) => SIZE.left + ((value - x0) / (x1 - x0)) * (SIZE.width - SIZE.left - SIZE.right);
  const y = (value) => SIZE.height - SIZE.bottom - ((value - y0) / (y1 - y0)) * (SIZE.height - SIZE.top - SIZE.bottom);
  const ends = letters.map((letter) => [letter, curve.runs[letter] || []]).filter(([, mine]) => mine.length);
  const told = ends.map(([letter, mine]) => `${letters.length > 1 ? `${letter} ` : ""}${short(mine[0][1])} to ${short(mine.at(-1)[1])}`).join(", ");
  const svg = shape("svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img", "aria-label": `${curve.title}: ${told}` });
  for (const at of [y0, (y0 + y1) / 2, y1]) {
    svg.append(shape("line", { class: "grid", x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: y(at), y2: y(at) }));
    svg.append(shape("text", { x: SIZE.left - 4, y: y(at) + 3, "text-anchor": "end" }, short(at)));
  }
  for (const at of new Set([Math.ceil(x0), Math.round((x0 + x1) / 2), Math.floor(x1)]))
    svg.append(shape("text", { x: x(at), y: SIZE.height - 5, "text-anchor": "middle" }, String(at)));
  for (const [letter, mine] of ends) {
    const group = shape("g", { class: letter });
    const known = mine.filter((point) => typeof point[2] === "number" && typeof point[3] === "number");
    if (known.length > 1) {
      const edge = [...known.map((p) => [p[0], p[3]]), ...known.map((p) => [p[0], p[2]]).reverse()];
      group.append(shape("polygon", { points: edge.map(([a, b]) => `${x(a)},${y(b)}`).join(" ") }));
    }
    group.append(shape("polyline", { points: mine.map((p) => `${x(p[0])},${y(p[1])}`).join(" ") }));
    for (const point of mine) {
      const dot = shape("circle", { cx: x(point[0]), cy: y(point[1]), r: 2.2 });
      dot.append(shape("title", {}, `${letters.length > 1 ? `${letter}, ` : ""}iteration ${point[0]}: ${short(point[1])}`));
      group.append(dot);
    }
    svg.append(group);
  }
  return { svg, told };
}
