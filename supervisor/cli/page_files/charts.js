"use strict";
// The course of loss and rate, and the picture of who waits for whom. page.js has the data and calls this.

const PANELS = [
  { name: "loss", height: 120, of: (one) => one.loss },
  { name: "steps a second", height: 60, of: (one) => one.rate },
];
const LOG_FROM = 20; // a loss that varies by more than this factor is drawn in log scale
const GAP = 22;

const shown_number = (value) => (value === 0 || (Math.abs(value) >= 0.001 && Math.abs(value) < 100000) ? String(Number(value.toPrecision(4))) : value.toExponential(2));

// ----- loss and rate -----

function curve_points(curve, status) {
  const points = curve.points.map((one) => ({ ...one, ms: Date.parse(one.at), rate: null }));
  const last = points[points.length - 1];
  if (!status.outcome && last && last.attempt === status.attempt && status.step > last.step) points.push({ at: status.now, ms: Date.parse(status.now), attempt: status.attempt, step: status.step, loss: status.loss ?? null, rate: null });
  points.forEach((one, index) => {
    const before = points[index - 1];
    if (!before || before.attempt !== one.attempt || one.step === null || before.step === null || one.ms <= before.ms || one.step <= before.step) return;
    one.rate = ((one.step - before.step) * 1000) / (one.ms - before.ms);
  });
  return points;
}

// A line is broken between attempts, and where the loss was no number.
function line_of(points, of, x, y, breaks) {
  let text = "";
  let before = null;
  for (const one of points) {
    if (of(one) === null) continue;
    const broken = !before || before.attempt !== one.attempt || (breaks && breaks.some((ms) => ms > before.ms && ms <= one.ms));
    text += `${broken ? "M" : "L"}${x(one.ms).toFixed(1)} ${y(of(one)).toFixed(1)}`;
    if (broken) text += "h.01"; // one point alone is seen as well
    before = one;
  }
  return text;
}

function scale(values, top, height, from_zero) {
  const [low, high] = [from_zero ? 0 : Math.min(...values), Math.max(...values)];
  const log = low > 0 && high / low > LOG_FROM;
  const place = (value) => (log ? Math.log(value) : value);
  const span = place(high) - place(low) || 1;
  return { low, high, log, y: (value) => top + height - ((place(value) - place(low)) / span) * height };
}

function draw_curve(status) {
  const box = at("curve");
  const width = Math.max(200, box.clientWidth);
  const points = curve_points(now.curve, status);
  const [start, end] = span_of(status);
  const x = (ms) => Math.max(0, Math.min(1, (ms - start) / Math.max(1, end - start))) * width;
  const marks = now.curve.marks.map((one) => ({ ...one, ms: Date.parse(one.at) }));
  const breaks = marks.filter((one) => one.kind === "nan").map((one) => one.ms);
  const picture = svg("svg", { width, "aria-hidden": "true" });
  let top = GAP;
  now.read = [];
  for (const { name, height, of } of PANELS) {
    const told = points.filter((one) => of(one) !== null);
    if (!told.length) continue;
    const { high, log, y } = scale(told.map(of), top, height, name !== "loss");
    picture.append(svg("rect", { x: 0, y: top, width, height, class: "panel" }));
    for (const one of marks) picture.append(mark_of(one, x(one.ms), top, height, name));
    picture.append(svg("path", { d: line_of(points, of, x, y, name === "loss" && breaks), class: `line ${name === "loss" ? "loss" : "rate"}` }));
    const heading = svg("text", { x: 2, y: top - 5, class: "label" });
    heading.textContent = `${name}: ${shown_number(Math.min(...told.map(of)))} to ${shown_number(high)}${log ? " (log scale)" : ""}`;
    picture.append(heading);
    now.read.push({ of, y });
    top += height + GAP;
  }
  picture.setAttribute("height", top - GAP + 2);
  now.points = points;
  now.x = x;
  at("curve-none").hidden = now.read.length > 0;
  box.hidden = at("reading").hidden = !now.read.length;
  if (box.hidden) return;
  box.replaceChildren(picture);
  box.setAttribute("aria-valuemax", points.length - 1);
  read_point(now.chosen_point === null ? null : Math.min(now.chosen_point, points.length - 1));
  at("marks").replaceChildren(...marks.slice(-6).reverse().map((one) => make("li", { className: WRONG.includes(one.kind) ? "bad" : "", text: `${clock(one.at)} ${one.text}` })));
}

const WRONG = ["nan", "spike", "divergence"];
function mark_of(one, x, top, height, panel) {
  const bad = WRONG.includes(one.kind);
  const drawn = svg("g", { class: `mark ${bad ? "wrong" : one.kind}` }, `${clock(one.at)} ${one.text}`);
  drawn.append(svg("line", { x1: x, x2: x, y1: top, y2: top + height }));
  if (bad && panel === "loss") drawn.append(svg("path", { d: `M${x - 6} ${top}h12l-6 10z` }));
  if (one.kind === "back" && panel === "loss") drawn.append(svg("path", { d: `M${x} ${top + height - 12}v12l-10 -6z` }));
  return drawn;
}

// Reads the value at one point, by pointer or by keyboard; null: the newest one, without a cursor.
function read_point(index) {
  const box = at("curve");
  now.chosen_point = index;
  const one = now.points[index === null ? now.points.length - 1 : index];
  const parts = [clock(one.at), one.step === null ? "" : `step ${one.step.toLocaleString()}`, one.loss === null ? "" : `loss ${shown_number(one.loss)}`, one.rate === null ? "" : `${shown_number(one.rate)} steps a second`, `attempt ${one.attempt}`];
  const text = parts.filter(Boolean).join(", ");
  at("reading").textContent = text;
  box.setAttribute("aria-valuenow", index === null ? now.points.length - 1 : index);
  box.setAttribute("aria-valuetext", text);
  const picture = box.querySelector("svg");
  for (const old of picture.querySelectorAll(".cursor")) old.remove();
  if (index === null) return;
  const x = now.x(one.ms);
  picture.append(svg("line", { x1: x, x2: x, y1: GAP, y2: picture.getAttribute("height"), class: "cursor" }));
  for (const { of, y } of now.read) if (of(one) !== null) picture.append(svg("circle", { cx: x, cy: y(of(one)), r: 4, class: "cursor" }));
}

function nearest_point(ms_x) {
  let best = 0;
  now.points.forEach((one, index) => { if (Math.abs(now.x(one.ms) - ms_x) < Math.abs(now.x(now.points[best].ms) - ms_x)) best = index; });
  return best;
}

function begin_curve() {
  const box = at("curve");
  box.addEventListener("pointermove", (event) => read_point(nearest_point(event.clientX - box.getBoundingClientRect().left)));
  box.addEventListener("pointerleave", () => { if (document.activeElement !== box) read_point(null); });
  box.addEventListener("keydown", (event) => {
    const last = now.points.length - 1;
    const here = now.chosen_point === null ? last : now.chosen_point;
    const far = Math.max(1, Math.round(last / 10));
    const to = { ArrowLeft: here - 1, ArrowDown: here - 1, ArrowRight: here + 1, ArrowUp: here + 1, PageDown: here - far, PageUp: here + far, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    read_point(Math.max(0, Math.min(last, to)));
  });
  window.addEventListener("resize", () => { if (now.status && now.curve) draw_curve(now.status); });
}

// ----- who waits for whom -----

const BOX = { width: 200, height: 44, gap: 26, between: 70 };
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function who(node) {
  if (node.count === 1 && node.ranks.length) return `rank ${node.ranks[0]}`;
  return count(node.count, "rank");
}

function named_ranks(node) {
  return rank_text(node.ranks) + (node.ranks.length < node.count ? ", …" : "");
}

// Columns by the way to those that wait for nobody; where all wait in a ring, to the suspects.
function columns_of(graph) {
  const sources = new Set(graph.edges.map((one) => one.waiting));
  const depth = new Map();
  let next = graph.nodes.map((_, index) => index).filter((index) => !sources.has(index));
  if (!next.length) next = graph.nodes[0].suspect ? graph.nodes.map((_, index) => index).filter((index) => graph.nodes[index].suspect) : [0];
  for (let level = 0; next.length; level++) {
    for (const index of next) depth.set(index, level);
    next = [...new Set(graph.edges.filter((one) => next.includes(one.waited) && !depth.has(one.waiting)).map((one) => one.waiting))];
  }
  const columns = [];
  graph.nodes.forEach((_, index) => { const level = depth.get(index) ?? 0; (columns[level] = columns[level] || []).push(index); });
  return columns.filter(Boolean).reverse();
}

function waits_picture(graph, name, room) {
  const columns = columns_of(graph);
  const sideways = columns.length * (BOX.width + BOX.between) - BOX.between <= room;
  const most = Math.max(...columns.map((one) => one.length));
  const across = sideways ? 1 : Math.max(1, Math.floor((room + 12) / (BOX.width + 12)));
  const places = new Map();
  let down = 4;
  columns.forEach((column, level) => {
    column.forEach((index, row) => {
      const x = sideways ? level * (BOX.width + BOX.between) : (row % across) * (BOX.width + 12);
      const y = sideways ? 4 + (row + (most - column.length) / 2) * (BOX.height + BOX.gap) : down + Math.floor(row / across) * (BOX.height + 12);
      places.set(index, { x: x + 3, y });
    });
    down += Math.ceil(column.length / across) * (BOX.height + 12) + 40;
  });
  const width = sideways ? columns.length * (BOX.width + BOX.between) - BOX.between + 6 : Math.min(most, across) * (BOX.width + 12) + 6;
  const height = sideways ? most * (BOX.height + BOX.gap) : down - 40;
  const picture = svg("svg", { width, height, class: "waits", role: "img", "aria-label": cut(graph.edges.map((one) => one.text).join("; "), 600) });
  const arrow = svg("marker", { id: `arrow-${name}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, orient: "auto-start-reverse" });
  arrow.append(svg("path", { d: "M0 0L8 4L0 8z" }));
  picture.append(arrow);
  graph.edges.forEach((edge, index) => picture.append(wait_line(edge, places, sideways, name, index)));
  graph.nodes.forEach((node, index) => picture.append(wait_box(node, places.get(index))));
  return picture;
}

function wait_line(edge, places, sideways, name, index) {
  const [from, to] = [places.get(edge.waiting), places.get(edge.waited)];
  const apart = ((index % 3) - 1) * 8; // two that wait for each other have a line each
  const half = BOX.height / 2 + apart;
  const middle = BOX.width / 2 + 3 * apart;
  let d;
  if (from.x + BOX.width < to.x) d = `M${from.x + BOX.width} ${from.y + half}C${from.x + BOX.width + 34} ${from.y + half} ${to.x - 34} ${to.y + half} ${to.x - 1} ${to.y + half}`;
  else if (to.x + BOX.width < from.x) d = `M${from.x} ${from.y + half}C${from.x - 34} ${from.y + half} ${to.x + BOX.width + 34} ${to.y + half} ${to.x + BOX.width + 1} ${to.y + half}`;
  else if (from.y < to.y) d = `M${from.x + middle} ${from.y + BOX.height}L${to.x + middle} ${to.y - 1}`;
  else d = `M${from.x + middle} ${from.y}L${to.x + middle} ${to.y + BOX.height + 1}`;
  return svg("path", { d, class: "wait", "marker-end": `url(#arrow-${name})` }, edge.text);
}

function wait_box(node, { x, y }) {
  const drawn = svg("g", { class: node.suspect ? "suspect" : "" }, `${who(node)}: ${named_ranks(node)}${node.place ? `, in ${node.place}` : ""}`);
  const first = svg("text", { x: x + 8, y: y + 18, class: "who" });
  first.textContent = cut(`${who(node)}${node.suspect ? " (suspect)" : ""}`, 24);
  const second = svg("text", { x: x + 8, y: y + 35 });
  second.textContent = cut(node.count > 1 ? named_ranks(node) : node.place, 26);
  drawn.append(svg("rect", { x, y, width: BOX.width, height: BOX.height, rx: 6 }), first, second);
  return drawn;
}

function waits_parts(graph, name, room) {
  const said = graph.edges.slice(0, 12).map((one) => make("li", { text: one.text }));
  for (const node of graph.nodes) if (node.suspect && node.place) said.push(make("li", { text: `${who(node)} is in ${node.place}` }));
  if (graph.left_out) said.push(make("li", { className: "muted", text: `${count(graph.left_out, "rank")} in smaller groups ${graph.left_out === 1 ? "is" : "are"} not drawn` }));
  if (graph.unseen) said.push(make("li", { className: "muted", text: `of ${count(graph.unseen, "rank")} this is not known: not all nodes are asked` }));
  return [make("h3", { text: "Who waits for whom" }), make("div", { className: "wide" }, waits_picture(graph, name, room)), make("ul", { className: "said" }, ...said)];
}
