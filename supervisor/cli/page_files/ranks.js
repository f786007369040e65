"use strict";
// All ranks of the attempt as cells of one canvas: a cell for each, side by side for each node. page.js has the data.

const CELLS = [[64, 26], [1024, 14], [8192, 8], [Infinity, 6]]; // up to so many ranks -> pixels of a cell
const KINDS = { well: "--good", slow: "--warn", silent: "--warn", suspect: "--bad", SUSPECT: "--warn", CORDONED: "--off", LOST: "--bad" };
const cells = { list: [], size: 0, chosen: 0, key: "" };

// What is wrong with single ranks: the worst word for each.
function rank_marks(status) {
  const marks = new Map();
  const mark = (ranks, kind, text) => { for (const rank of ranks || []) marks.set(rank, { kind, text }); };
  if (status.input_wait) mark(status.input_wait.ranks, "slow", "short of data");
  if (status.stragglers) mark(status.stragglers.ranks, "slow", "slow");
  if (status.silence) mark(status.silence.ranks, "silent", "without progress");
  if (status.hung) mark(status.hung.ranks, "silent", "in a hang");
  for (const one of now.incidents) if (!one.closed_at && one.verdict) mark(one.verdict.culprits.map((who) => who.rank), "suspect", `suspect (${one.id})`);
  return status.outcome ? new Map() : marks;
}

function rank_cells(status) {
  const marks = rank_marks(status);
  const list = [];
  const members = now.nodes.filter((node) => node.ranks.length).sort((a, b) => a.ranks[0] - b.ranks[0]);
  for (const node of members) {
    node.ranks.forEach((rank, local) => {
      const bad = BAD_NODES.includes(node.state) ? node.state : "";
      const mark = marks.get(rank);
      list.push({ rank, local, node: node.node, kind: mark ? mark.kind : bad || "well", text: mark ? mark.text : bad ? `on a ${bad.toLowerCase()} node` : "well" });
    });
  }
  return list;
}

// Nodes stand side by side, as many as fit, with a gap between; the ranks of one are never torn apart where they fit.
function place_cells(list, width) {
  const size = CELLS.find(([most]) => list.length <= most)[1];
  const gap = Math.ceil(size / 3);
  let [x, y, before, widest] = [0, 0, null, 0];
  const counts = new Map();
  for (const one of list) counts.set(one.node, (counts.get(one.node) || 0) + 1);
  for (const one of list) {
    if (before !== null && before !== one.node) x += gap;
    const needs = before === one.node ? size : Math.min(counts.get(one.node) * size, width);
    if (x + needs > width) [x, y] = [0, y + size + gap];
    [one.x, one.y] = [x, y];
    x += size;
    widest = Math.max(widest, x);
    before = one.node;
  }
  return { size, width: widest, height: list.length ? y + size : 0 };
}

function draw_ranks(status) {
  const box = at("ranks");
  const list = rank_cells(status);
  const counts = {};
  for (const one of list) counts[one.text] = (counts[one.text] || 0) + 1;
  at("rank-counts").textContent = list.length ? Object.entries(counts).map(([text, number]) => `${number.toLocaleString()} ${text}`).join(", ") : "No rank has started.";
  box.hidden = at("rank-reading").hidden = !list.length;
  if (!list.length) return;
  const key = `${box.parentElement.clientWidth} ${devicePixelRatio} ${matchMedia("(prefers-color-scheme: dark)").matches} ${list.map((one) => one.rank + one.kind).join()}`;
  if (cells.key === key) return;
  const placed = place_cells(list, box.parentElement.clientWidth - 4);
  Object.assign(cells, { list, key, size: placed.size, chosen: Math.min(cells.chosen, list.length - 1) });
  [box.width, box.height] = [placed.width * devicePixelRatio, placed.height * devicePixelRatio];
  [box.style.width, box.style.height] = [`${placed.width}px`, `${placed.height}px`];
  box.setAttribute("aria-valuemax", list.length - 1);
  paint_ranks();
  read_rank(cells.chosen, false);
}

function paint_ranks() {
  const box = at("ranks");
  const ink = box.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const inner = cells.size - (cells.size > 8 ? 3 : 1);
  ink.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  ink.clearRect(0, 0, box.width, box.height);
  ink.font = "11px system-ui";
  for (const one of cells.list) {
    ink.fillStyle = ink.strokeStyle = style.getPropertyValue(KINDS[one.kind]);
    const well = one.kind === "well";
    if (well && cells.size > 8) ink.strokeRect(one.x + 1, one.y + 1, inner - 1, inner - 1);
    else if (well) { ink.globalAlpha = 0.45; ink.fillRect(one.x, one.y, inner, inner); ink.globalAlpha = 1; } // what is wrong stands out by more than its colour
    else ink.fillRect(one.x, one.y, inner, inner);
    if (cells.size < 20) continue;
    ink.fillStyle = style.getPropertyValue(well ? "--front" : "--card");
    ink.fillText(String(one.rank), one.x + 4, one.y + 16, inner - 6);
  }
}

// Reads one rank, by pointer or by keyboard.
function read_rank(index, shown = true) {
  cells.chosen = index;
  const one = cells.list[index];
  const row = (now.status.ranks || []).find((each) => each.rank === one.rank);
  const step = row ? `${row.step === null ? "" : `, step ${row.step.toLocaleString()}`}${row.text ? `, ${row.text}` : ""}` : "";
  const text = `rank ${one.rank}, local rank ${one.local} on node ${one.node}: ${one.text}${step}`;
  at("ranks").setAttribute("aria-valuenow", index);
  at("ranks").setAttribute("aria-valuetext", text);
  if (!shown) return;
  at("rank-reading").textContent = text;
  const cursor = at("rank-cursor");
  Object.assign(cursor.style, { left: `${one.x - 2}px`, top: `${one.y - 2}px`, width: `${cells.size + 2}px`, height: `${cells.size + 2}px` });
  cursor.hidden = false;
}

function rank_below(event) {
  const place = at("ranks").getBoundingClientRect();
  const [x, y] = [event.clientX - place.left, event.clientY - place.top];
  return cells.list.findIndex((one) => x >= one.x && x < one.x + cells.size && y >= one.y && y < one.y + cells.size);
}

function begin_ranks() {
  const box = at("ranks");
  box.addEventListener("pointermove", (event) => { const index = rank_below(event); if (index >= 0) read_rank(index); });
  box.addEventListener("click", (event) => { const index = rank_below(event); if (index >= 0) choose(cells.list[index].node); });
  box.addEventListener("keydown", (event) => {
    const last = cells.list.length - 1;
    const here = cells.list[cells.chosen];
    const near = (rows) => rows.reduce((best, [one, index]) => (best < 0 || Math.abs(one.x - here.x) < Math.abs(cells.list[best].x - here.x) ? index : best), -1);
    const line = (y) => near(cells.list.map((one, index) => [one, index]).filter(([one]) => one.y === y));
    const step = cells.size + Math.ceil(cells.size / 3);
    if (event.key === "Enter") choose(here.node);
    const to = { ArrowLeft: cells.chosen - 1, ArrowRight: cells.chosen + 1, ArrowUp: line(here.y - step), ArrowDown: line(here.y + step), Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to < 0 || to > last) return;
    read_rank(to);
    at("rank-cursor").scrollIntoView({ block: "nearest" });
  });
  const again = () => { if (now.status) draw_ranks(now.status); };
  window.addEventListener("resize", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
}
