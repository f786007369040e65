"use strict";
// Everything that comes from the job is text: it is set by textContent and never becomes markup.

const at = (id) => document.getElementById(id);
const now = { status: null, nodes: [], checkpoints: [], incidents: [], rows: [], seq: 0, steps: [], chosen: "", curve: { points: [], marks: [] }, points: [], read: [], chosen_point: null };
const COLOURS = { ACTIVE: "good", RUNNING: "good", SUCCEEDED: "good", FAILED: "bad", HUNG: "bad", LOST: "bad", DIAGNOSING: "warn", RECOVERING: "warn", STARTING: "warn", STOPPED: "idle", IDLE: "idle" };
const PHASES = ["detect", "diagnose", "decide", "stop", "rendezvous", "start", "first_step"];
const PHASE_COLOURS = ["#7b8794", "#9c6ade", "#2f80ed", "#b3261e", "#d98200", "#1a7f37", "#56a86f"];
const MANY_NODES = 256;

function make(name, { text, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

function svg(name, attributes, title) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (title) element.append(Object.assign(document.createElementNS("http://www.w3.org/2000/svg", "title"), { textContent: title }));
  return element;
}

function duration(s) {
  if (s === null || s === undefined) return "?";
  if (s < 10) return `${s.toFixed(2)} s`;
  if (s < 60) return `${s.toFixed(1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}
const seconds = (from, to) => (Date.parse(to) - Date.parse(from)) / 1000;
const two = (number) => String(number).padStart(2, "0");
function clock(time) {
  if (!time) return "";
  const t = new Date(time);
  return `${t.getFullYear()}-${two(t.getMonth() + 1)}-${two(t.getDate())} ${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())}`;
}
const count = (number, one) => `${number.toLocaleString()} ${one}${number === 1 ? "" : "s"}`;

function rank_text(ranks) {
  const parts = [];
  for (let i = 0; i < ranks.length; ) {
    let j = i;
    while (j + 1 < ranks.length && ranks[j + 1] === ranks[j] + 1) j++;
    parts.push(i === j ? `${ranks[i]}` : `${ranks[i]}-${ranks[j]}`);
    i = j + 1;
  }
  return parts.join(", ");
}

// ----- the sentence and the figures -----

function rate() {
  const steps = now.steps;
  if (steps.length < 2) return null;
  const [first, last] = [steps[0], steps[steps.length - 1]];
  return last.at > first.at && last.step > first.step ? ((last.step - first.step) * 1000) / (last.at - first.at) : null;
}

function note_step(status) {
  const last = now.steps[now.steps.length - 1];
  if (status.step === null || (last && last.attempt !== status.attempt) || (last && status.step < last.step)) now.steps = [];
  if (status.step === null || (last && last.step === status.step && now.steps.length)) return;
  now.steps.push({ at: Date.parse(status.now), step: status.step, attempt: status.attempt });
  if (now.steps.length > 60) now.steps.shift();
}

function sentence(status) {
  if (status.outcome) return status.outcome.line;
  const open = status.incidents.filter((one) => one.open).pop();
  const broken = open ? `${open.id}: ${open.failure_class || "not classified yet"}${open.why ? `: ${open.why}` : ""}.` : "";
  const waits = status.waiting || status.forming;
  if (waits || open) return `${broken}${waits ? ` Waiting: ${waits}.` : ""}`.trim();
  const nodes = now.nodes.filter((node) => node.ranks.length).length;
  const step = status.step === null ? "no step is known yet" : `at step ${status.step.toLocaleString()}${status.last_step === null ? "" : ` of ${status.last_step.toLocaleString()}`}`;
  return `${status.state === "RUNNING" ? "Training" : "Starting"} on ${count(nodes, "node")}, ${step}, attempt ${status.attempt}.`;
}

function restart_text(restart) {
  if (!restart) return "";
  const from = restart.from_memory ? `snapshot of step ${restart.step}` : restart.path ? (restart.step === null ? restart.path : `step ${restart.step}`) : "the beginning";
  const steps = restart.loses_steps === null ? "" : `, ${count(restart.loses_steps, "step")} again`;
  return `${from}${steps}${restart.loses_s === null ? "" : ` (${duration(restart.loses_s)})`}`;
}

function figures(status) {
  const speed = rate();
  const left = speed && status.last_step !== null ? (status.last_step - status.step) / speed : null;
  const saved = now.checkpoints.filter((one) => one.complete && !one.copy_of).sort((a, b) => Date.parse(b.modified_at) - Date.parse(a.modified_at))[0];
  const over = Boolean(status.outcome);
  const age = saved && !over ? `${duration(Math.max(0, seconds(saved.modified_at, status.now)))} ago` : saved ? clock(saved.modified_at) : "";
  return [
    ["step", status.step === null ? "?" : status.step.toLocaleString() + (status.last_step === null ? "" : ` of ${status.last_step.toLocaleString()}`)],
    ["steps a second", speed === null || status.state !== "RUNNING" ? "" : speed.toPrecision(3)],
    ["time left", left === null || status.state !== "RUNNING" ? "" : duration(left)],
    ["loss", status.loss === undefined ? "" : shown_number(status.loss)],
    ["attempt", `${status.attempt} (${count(status.restarts, "restart")})`],
    ["last checkpoint", saved ? `step ${saved.step ?? "?"}, ${age}` : "none"],
    ["a restart now resumes from", restart_text(status.restart)],
    ["lost so far", duration(status.lost_s)],
    ["ETTR", status.ettr === null ? "" : `${(status.ettr * 100).toFixed(1)} %`],
    ["mode", status.mode + (status.paused ? ", paused" : "")],
  ].filter(([, value]) => value);
}

function attention(status) {
  const said = [];
  const say = (text, bad, ...buttons) => said.push(make("li", { className: bad ? "bad" : "", text }, ...buttons));
  if (status.pause) say(`Paused since ${clock(status.pause.at)} by ${status.pause.by}${status.pause.reason ? `: ${status.pause.reason}` : ""}. Nothing is done about failures. `, true, button("resume"));
  if (status.hold) {
    const ends = status.hold.ends_at ? ` The job ends at ${clock(status.hold.ends_at)} if nobody decides.` : "";
    if (status.hold.why) say(`Held: ${status.hold.why}.${ends} `, true, button("resume"));
    else {
      // By its version: a plan that nobody here has seen is not approved.
      say(`A plan waits for approval.${ends} `, true, button("approve", status.hold.approves || ""), button("reject", status.hold.approves || ""));
    }
  }
  if (status.hung) say(`The ranks hang, and nobody acts on it. `, true, button("restart"));
  if (status.silence) say(status.silence.text, false);
  if (status.breaker.tripped) say(`The circuit breaker has tripped: ${status.breaker.used} of ${status.breaker.limit} nodes were taken out within the hour.`, true);
  for (const swap of status.swaps || []) say(`${swap.text} `, false, button("swap", swap.node, swap.node), button("reject", swap.node, swap.node));
  for (const text of status.degraded) say(text, false);
  for (const one of [status.stragglers, status.input_wait]) if (one) say(one.text, false);
  for (const rule of status.pending_rules || []) say(`A proposed rule waits: ${rule.name ?? rule}`, false);
  if (!status.controller && !status.outcome) say("No controller answers: this is what the journal says.", true);
  return said;
}

// ----- the strip -----

const span_of = (status) => [Date.parse(status.started_at || status.defined_at), Date.parse(status.ended_at || status.now)];

function strip(status) {
  const [start, end] = span_of(status);
  const picture = svg("svg", { viewBox: "0 0 1000 44", preserveAspectRatio: "none", role: "img", "aria-label": `${count(status.incidents_total, "incident")} since the start` });
  const x = (time) => Math.max(0, Math.min(1000, ((Date.parse(time) - start) / Math.max(1, end - start)) * 1000));
  picture.append(svg("rect", { x: 0, y: 16, width: 1000, height: 12, fill: "var(--good)" }));
  for (const one of now.incidents) {
    const from = x(one.opened_at);
    const wide = Math.max(3, x(one.closed_at || status.now) - from);
    const stopped = one.next_attempt !== null || !one.closed_at;
    const mark = svg("rect", { x: from, y: stopped ? 6 : 12, width: wide, height: stopped ? 32 : 20, fill: one.trigger === "swap" ? "var(--link)" : stopped ? "var(--bad)" : "var(--warn)" }, `${one.id}: ${one.verdict ? one.verdict.failure_class : "?"}, ${clock(one.opened_at)}`);
    mark.style.cursor = "pointer";
    mark.addEventListener("click", () => show_incident(one.id));
    picture.append(mark);
  }
  for (const one of status.swaps || []) picture.append(svg("path", { d: `M${x(one.about || status.now) - 14} 0h14v44h-14l8 -22z`, fill: "var(--link)" }, one.text));
  at("strip").replaceChildren(picture);
  at("strip-times").textContent = start ? `${clock(start)} to ${clock(end)}: ${duration((end - start) / 1000)}` : "";
}

// ----- incidents -----

function culprits(verdict) {
  return verdict.culprits.map((one) => ["node", "rank", "gpu"].filter((key) => one[key] !== null && one[key] !== "").map((key) => `${key} ${one[key]}`).join(", ")).join("; ");
}

function phases(incident) {
  const known = PHASES.filter((name) => incident.seconds[name] !== undefined);
  const whole = known.reduce((sum, name) => sum + incident.seconds[name], 0);
  const words = known.map((name) => `${name.replace("_", " ")} ${incident.seconds[name].toFixed(2)}`).join(" + ");
  const bar = make("div", { className: "phases", ariaHidden: "true" });
  for (const name of known) {
    const part = make("span", { title: name });
    part.style.flexGrow = String(Math.max(1000 * incident.seconds[name], 1)); // under 1 in all they would not fill the bar
    part.style.background = PHASE_COLOURS[PHASES.indexOf(name)];
    bar.append(part);
  }
  return known.length ? [bar, make("p", { className: "muted", text: `${words} = ${whole.toFixed(2)} s` })] : [];
}

function opinion(one) {
  if (one.opinion_wanted) return [make("p", { className: "muted", text: "A language model is asked for its opinion." })];
  const told = one.opinion;
  if (!told) return [];
  if (told.problem) return [make("p", { className: "muted", text: `A language model was asked and gave no opinion: ${told.problem}` })];
  const lines = told.lines.map((text) => make("p", { className: "evidence", text }));
  return [make("h3", { text: "A language model's opinion (it decides nothing)" }), make("p", { text: `${told.failure_class}: ${told.why} (${told.model || "model"}, ${duration(told.took_s)})` }), ...lines];
}

function incident_body(one) {
  const verdict = one.verdict;
  const parts = [make("p", { text: one.what })];
  if (verdict) {
    const others = verdict.alternatives.map((other) => `${other.failure_class} ${Math.round(other.confidence * 100)} %`).join(", ");
    parts.push(make("p", { text: `${verdict.failure_class}, ${Math.round(verdict.confidence * 100)} % sure: ${verdict.why}` }));
    if (culprits(verdict)) parts.push(make("p", { text: `Who: ${culprits(verdict)}` }));
    if (one.plan) parts.push(make("p", { text: `What was decided: ${one.plan.kind}: ${one.plan.why}` }));
    if (one.revised) parts.push(make("p", { className: "muted", text: `Before late evidence: ${one.revised}` }));
    if (one.tests) parts.push(make("p", { text: `Tests of suspects: ${one.tests.text || `${one.tests.suspects.join(", ")} are tested`}` }));
    if (one.closed_why) parts.push(make("p", { text: `How it ended: ${one.closed_why}. Lost: ${duration(one.lost_s)}.` }));
    if (one.waits) parts.push(...waits_parts(one.waits, one.id, at("incidents").clientWidth - 8));
    if (verdict.evidence.length) parts.push(make("h3", { text: "Evidence" }));
    for (const piece of verdict.evidence) parts.push(make("p", { className: "evidence", text: `${[piece.source, piece.node, piece.rank === null ? "" : `rank ${piece.rank}`].filter(Boolean).join(", ")}: ${piece.text}` }));
    if (others) parts.push(make("p", { className: "muted", text: `Less likely: ${others}` }));
  }
  if (one.alerts) parts.push(make("h3", { text: "Alerts from outside (they prove nothing)" }), ...alert_rows(one.alerts).map((row) => make("p", { text: `${row[1]}: ${row[3]} (${row[4]})${row[6] ? `: ${row[6]}` : ""}` })));
  parts.push(...phases(one));
  for (const other of one.recurrences || []) parts.push(make("p", { text: `Before: ${other.text}` }));
  for (const other of one.corrections || []) parts.push(make("p", { text: `Corrected by ${other.by}: ${other.failure_class}${other.note ? `: ${other.note}` : ""}` }));
  parts.push(...opinion(one));
  if (one.folders.length) parts.push(make("p", { className: "muted", text: `Whole evidence: ${one.folders.join(", ")}` }));
  return parts;
}

function incidents() {
  const open = new Set([...at("incidents").querySelectorAll("details[open]")].map((one) => one.id));
  const list = now.incidents.slice(-50).reverse().map((one) => {
    const state = one.closed_at ? "" : " (open)";
    const words = `${one.id}${state} · ${clock(one.opened_at)} · ${one.verdict ? one.verdict.failure_class : "not classified yet"} · ${one.closed_at ? `lost ${duration(one.lost_s)}` : "now"}`;
    const summary = make("summary", {}, make("strong", { text: words }), make("span", { className: "muted", text: ` ${one.verdict ? one.verdict.why : one.what}` }));
    return make("details", { id: one.id, open: open.has(one.id) || !one.closed_at }, summary, ...incident_body(one));
  });
  const older = now.incidents.length > 50 ? [make("p", { className: "muted", text: `${now.incidents.length - 50} older ones: unbroken incidents` })] : [];
  at("incidents").replaceChildren(...(list.length ? list : [make("p", { className: "muted", text: "None so far." })]), ...older);
}

// `#i-3`, or `#last`: the newest.
function follow_link() {
  const newest = now.incidents[now.incidents.length - 1];
  const id = location.hash.slice(1);
  show_incident(id === "last" && newest ? newest.id : id);
}

function show_incident(id) {
  const found = at(id);
  if (!found) return;
  found.open = true;
  found.scrollIntoView({ block: "center" });
  found.querySelector("summary").focus();
}

// ----- nodes -----

function node_text(node) {
  return `${node.node}, ${node.state.toLowerCase()}${node.ranks.length ? `, ranks ${rank_text(node.ranks)}` : ""}${node.why ? `: ${node.why}` : ""}`;
}

function nodes() {
  const grid = at("nodes");
  const dense = now.nodes.length > MANY_NODES;
  grid.classList.toggle("dense", dense);
  grid.style.setProperty("--cell", dense ? "14px" : "110px");
  const counts = {};
  for (const node of now.nodes) counts[node.state] = (counts[node.state] || 0) + 1;
  at("node-counts").textContent = Object.entries(counts).map(([state, number]) => `${number.toLocaleString()} ${state.toLowerCase()}`).join(", ") || "No node has joined yet.";
  const wanted = at("find").value.trim().toLowerCase();
  now.nodes.forEach((node, index) => {
    let cell = grid.children[index];
    if (!cell) grid.append((cell = make("button", { type: "button", tabIndex: index ? -1 : 0 })));
    const text = node_text(node);
    const kind = node.state + (wanted && matches(node, wanted) ? " found" : "");
    if (cell.dataset.node !== node.node) cell.dataset.node = node.node;
    if (cell.title !== text) {
      cell.title = text;
      cell.setAttribute("aria-label", text);
      cell.textContent = dense ? "" : node.node;
    }
    if (cell.className !== kind) cell.className = kind;
  });
  while (grid.children.length > now.nodes.length) grid.lastChild.remove();
  not_well();
  node_details();
  if (now.status) draw_ranks(now.status);
}

const BAD_NODES = ["SUSPECT", "LOST", "CORDONED"];
const BAD_SHOWN = 24;
function not_well() {
  const bad = now.nodes.filter((node) => BAD_NODES.includes(node.state)).sort((a, b) => BAD_NODES.indexOf(a.state) - BAD_NODES.indexOf(b.state));
  const key = JSON.stringify(bad.map((node) => [node.node, node.state]));
  if (at("not-well").dataset.key === key) return;
  at("not-well").dataset.key = key;
  const more = bad.length > BAD_SHOWN ? [make("span", { className: "muted", text: `and ${bad.length - BAD_SHOWN} more` })] : [];
  at("not-well").replaceChildren(...bad.slice(0, BAD_SHOWN).map((node) => make("button", { type: "button", text: `${node.node}: ${node.state.toLowerCase()}`, onclick: () => choose(node.node) })), ...more);
}

function choose(name) {
  now.chosen = name;
  node_details();
}

// Thousands of cells are one stop of the Tab key; arrows move between them.
function move_in_grid(event) {
  const cells = [...at("nodes").children];
  const here = cells.indexOf(event.target.closest("button"));
  if (here < 0) return;
  const wide = cells.findIndex((cell) => cell.offsetTop > cells[0].offsetTop);
  const columns = wide < 0 ? cells.length : wide;
  const to = { ArrowLeft: here - 1, ArrowRight: here + 1, ArrowUp: here - columns, ArrowDown: here + columns, Home: 0, End: cells.length - 1 }[event.key];
  if (to === undefined || !cells[to]) return;
  event.preventDefault();
  for (const cell of at("nodes").querySelectorAll('[tabindex="0"]')) cell.tabIndex = -1;
  cells[to].tabIndex = 0;
  cells[to].focus();
}

function matches(node, wanted) {
  return /^\d+$/.test(wanted) ? node.ranks.includes(Number(wanted)) || node.node.toLowerCase() === wanted : node.node.toLowerCase().includes(wanted) || node.host.toLowerCase().includes(wanted);
}

function node_details() {
  const node = now.nodes.find((one) => one.node === now.chosen);
  if (!node) return at("node").replaceChildren();
  const over = now.status && now.status.outcome;
  const cordoned = now.status && now.status.cordons.some((one) => one.node === node.node);
  const buttons = over ? [] : [cordoned ? button("uncordon", node.node) : button("cordon", node.node), button("swap", node.node)];
  const blamed = new Set(now.incidents.filter((one) => !one.closed_at && one.verdict).flatMap((one) => one.verdict.culprits.map((culprit) => culprit.rank)));
  const ranks = node.ranks.map((rank) => make("li", { className: blamed.has(rank) ? "bad" : "", text: blamed.has(rank) ? `rank ${rank} (suspect)` : `rank ${rank}` }));
  const gpus = over || !now.status ? [] : now.status.cordons.filter((one) => one.node === node.node && one.gpu).map((one) => make("li", { className: "warn", text: `GPU ${one.gpu} cordoned` }));
  at("node").replaceChildren(make("p", { text: `${node_text(node)} (host ${node.host}, ${node.address})` }), make("ul", { className: "ranks", ariaLabel: "Ranks" }, ...ranks, ...gpus), make("div", { className: "buttons" }, ...buttons));
}

// ----- tables -----

function table(columns, rows, none) {
  if (!rows.length) return make("p", { className: "muted", text: none });
  const head = make("tr", {}, ...columns.map((text) => make("th", { text, scope: "col" })));
  const body = rows.map((row) => make("tr", {}, ...row.map((text, index) => make("td", { text, className: columns[index] === "path" ? "path" : "" }))));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${bytes.toFixed(unit && bytes < 10 ? 1 : 0)} ${units[unit]}`;
}

function tables() {
  const saved = [...now.checkpoints].sort((a, b) => Date.parse(b.modified_at) - Date.parse(a.modified_at)).slice(0, 20);
  const rows = saved.map((one) => [one.step ?? "?", one.suspect ? "suspect" : one.verdict, size(one.size_bytes), clock(one.modified_at), one.where.join(", "), one.path, one.why]);
  at("checkpoints").replaceChildren(table(["step", "verdict", "size", "written", "where", "path", "why"], rows, "None was seen yet."));
  const cordons = now.status.cordons.map((one) => [one.node, one.gpu, one.reason, one.by, clock(one.at), clock(one.until), one.scheduler]);
  at("alerts").replaceChildren(table(["heard", "node", "GPU", "alert", "taken for", "what follows", "what it says"], alert_rows(now.status.alerts), "None fires."));
  at("cordons").replaceChildren(table(["node", "GPU", "reason", "by", "since", "until", "scheduler"], cordons, "None."));
}

const TAKEN = (one) => (one.swap ? "its node is swapped, where swaps are on" : one.suspect ? "its node is tested before a restart" : "it is told");
function alert_rows(alerts) {
  return (alerts || []).map((one) => [clock(one.at), one.node, one.gpu || "", one.name, one.failure_class || "unknown", TAKEN(one), one.text || ""]);
}

const is_command = (row) => row.kind === "override_given";

function audit() {
  const rows = now.rows.filter((row) => is_command(row) || (row.kind === "note" && row.text.startsWith("refused: "))).slice(-100).reverse();
  at("audit").replaceChildren(table(["time", "who asked for what"], rows.map((row) => [clock(row.at), row.text]), "Nobody has given a command."));
}

async function ledger() {
  if (!at("ledger-box").open) return;
  const answer = await (await fetch("api/ledger")).json();
  const rows = (answer.nodes || []).map((one) => [one.node, one.state, String(one.score), [...one.cordons.map((held) => `cordoned by ${held.by}: ${held.reason}`), ...one.proposals.map((held) => `a cordon is proposed by ${held.by}: ${held.reason}`), ...one.why].join("; ")]);
  const more = answer.left_out ? [make("p", { className: "muted", text: `${count(answer.left_out, "node")} without anything to tell` })] : [];
  at("ledger").replaceChildren(answer.error ? make("p", { className: "muted", text: answer.error }) : table(["node", "state", "points", "why"], rows, "Nothing is known against any node."), ...more);
}

function timeline() {
  const rows = now.rows.filter((row) => !row.detail).slice(-500).reverse();
  at("timeline").replaceChildren(...rows.map((row) => make("li", { className: row.loud ? "loud" : "" }, make("time", { text: clock(row.at), dateTime: row.at }), make("span", { text: row.text }))));
}

// ----- commands -----

const COMMANDS = {
  pause: { label: "Pause", title: "Watch and record, but do nothing" },
  resume: { label: "Resume", title: "Act again" },
  approve: { label: "Approve", title: "Carry out the plan that waits" },
  reject: { label: "Reject", title: "Do not carry out the plan that waits" },
  restart: { label: "Restart", title: "Stop the workers and start the next attempt" },
  rollback: { label: "Roll back", title: "Restart from an older checkpoint", asks: "Step (empty: the one before the newest)" },
  swap: { label: "Swap", title: "Replace the node at the next checkpoint", asks: "Node" },
  cordon: { label: "Cordon", title: "Do not use the node from the next attempt on", asks: "Node" },
  uncordon: { label: "Uncordon", title: "Use the node again", asks: "Node" },
  stop: { label: "Stop the job", title: "End the job" },
};
let asked = null;
let turn = 0; // an answer to an earlier question is not shown as the answer to this one

function button(command, argument = "", shown = "") {
  const { label, title } = COMMANDS[command];
  return make("button", { type: "button", title, text: shown ? `${label} ${shown}` : label, onclick: () => ask(command, argument) });
}

function actions(status) {
  const names = status.outcome ? [] : [status.paused ? "resume" : "pause", "restart", "rollback", "stop"];
  const key = names.join();
  if (at("actions").dataset.key === key) return;
  at("actions").dataset.key = key;
  at("actions").replaceChildren(...names.map((name) => button(name)));
}

async function send(dry_run, agreed = null) {
  const body = JSON.stringify({ command: asked.command, argument: at("argument").value.trim() || asked.argument, reason: at("reason").value, dry_run, agreed });
  try {
    const answer = await fetch("api/command", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    return await answer.json();
  } catch (error) {
    return { error: `\`unbroken page\` does not answer: ${error.message}. Nothing is known of what was done.` };
  }
}

// Of two operators the second is told what the first has done.
async function say_newest(element, mine) {
  await read_more();
  const newest = now.rows.filter(is_command).pop();
  if (mine === turn && newest && seconds(newest.at, now.status.now) < 600) element.textContent += `\nThe newest command: ${clock(newest.at)} ${newest.text}`;
}

async function look() {
  const mine = ++turn;
  at("would").textContent = "Asking what it would do …";
  at("yes").disabled = true;
  const answer = await send(true);
  if (mine !== turn) return;
  asked.would = answer;
  at("would").textContent = answer.error || answer.would;
  at("yes").disabled = Boolean(answer.error || answer.refused);
  if (at("yes").disabled) say_newest(at("would"), mine);
}

function ask(command, argument) {
  asked = { command, argument };
  turn++;
  at("yes").disabled = true;
  const { label, title, asks } = COMMANDS[command];
  at("confirm-title").textContent = `${title}${argument ? `: ${argument}` : ""}`;
  at("argument-label").hidden = at("look").hidden = !asks || Boolean(argument);
  at("argument-name").textContent = asks || "";
  at("argument").value = at("reason").value = at("outcome").textContent = "";
  at("yes").textContent = label;
  at("no").textContent = "Do nothing";
  at("yes").hidden = false;
  at("confirm").showModal();
  if (!asks || argument || command === "rollback") look();
  else at("would").textContent = "";
}

at("look").onclick = look;
at("argument").addEventListener("input", () => { turn++; at("yes").disabled = true; at("would").textContent = "Look again: the argument has changed."; });
at("argument").addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); look(); } });
at("reason").addEventListener("keydown", (event) => { if (event.key === "Enter") event.preventDefault(); });
at("yes").onclick = async () => {
  const mine = ++turn;
  const label = at("confirm-title").textContent;
  at("yes").disabled = true;
  at("outcome").textContent = "Sent …";
  const answer = await send(false, asked.would); // the job may have changed while the question stood here
  const said = answer.error || (answer.notes || []).join("\n") || "Done.";
  if (mine !== turn || !at("confirm").open) return tell(`${label}: ${said}`);
  at("outcome").textContent = said;
  at("yes").hidden = !answer.error;
  at("look").hidden = !answer.error; // it may have been done: look again before it is sent twice
  at("no").textContent = "Close";
  if (answer.error) say_newest(at("outcome"), mine);
};

// ----- what comes in -----

function draw() {
  const status = now.status;
  if (!status) return;
  document.title = `${status.state} ${status.name}`;
  at("job").textContent = status.name;
  at("state").textContent = status.state;
  at("state").className = `badge ${COLOURS[status.state] || ""}`;
  if (at("sentence").textContent !== sentence(status)) at("sentence").textContent = sentence(status);
  at("figures").replaceChildren(...figures(status).map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value }))));
  const told = JSON.stringify([status.pause, status.hold, status.hung, status.silence, status.breaker, status.swaps, status.degraded, status.stragglers, status.input_wait, status.pending_rules, !status.controller, !status.outcome]);
  if (at("attention").dataset.told !== told) {
    at("attention").dataset.told = told;
    at("attention").replaceChildren(...attention(status));
  }
  newest(status);
  actions(status);
  strip(status);
  draw_curve(status);
  draw_ranks(status);
  tables();
  if (Date.now() - curve_at > CURVE_MS && status.step !== curve_step) read_curve();
}

function newest(status) {
  const one = now.incidents[now.incidents.length - 1];
  at("newest").hidden = !one || !one.closed_at;
  if (at("newest").hidden) return;
  const what = one.verdict ? `${one.verdict.failure_class}: ${one.verdict.why}` : one.what;
  const text = `Last incident, ${duration(Math.max(0, seconds(one.closed_at, status.ended_at || status.now)))} ago: ${what}. ${one.plan ? `${one.plan.kind}: ` : ""}${one.closed_why}; lost ${duration(one.lost_s)}.`;
  if (at("newest-text").textContent !== text) at("newest-text").textContent = text;
  at("newest-link").textContent = one.id;
  at("newest-link").href = `#${one.id}`;
}

const CURVE_MS = 5000;
let curve_at = 0;
let curve_step = null;
async function read_curve() {
  curve_at = Date.now();
  curve_step = now.status.step;
  try {
    const found = await (await fetch("api/curve")).json();
    if (found.points) now.curve = found;
    draw_curve(now.status);
  } catch {
    /* the stream says what is wrong */
  }
}

let reading = null;
let again = false;
// Once at a time; who waits for it gets what was there when it was asked for.
function read_more() {
  again = true;
  reading = reading || (async () => {
    for (; again; await read_once()) again = false;
    reading = null;
  })();
  return reading;
}

async function read_once() {
  try {
    const found = await (await fetch("api/incidents")).json(); // what broke comes first: the timeline may take longer
    if (found.incidents) now.incidents = found.incidents;
    incidents();
    strip(now.status);
    newest(now.status);
    read_curve();
    if (location.hash && !now.went) { now.went = true; follow_link(); }
    const rows = await (await fetch(`api/timeline?since=${now.seq}`)).json();
    if (rows.rows) now.rows = now.rows.concat(rows.rows).slice(-2000);
    now.seq = now.rows.length ? now.rows[now.rows.length - 1].seq : 0;
    timeline();
    audit();
  } catch {
    /* the stream says what is wrong */
  }
}

const STORY = (status) => JSON.stringify([status.state, status.attempt, status.incidents, status.paused, status.cordons.length, status.swaps, status.ended_at]);
let story = "";
const stream = new EventSource("api/events");
stream.addEventListener("status", (event) => {
  now.status = JSON.parse(event.data);
  note_step(now.status);
  draw();
  if (story !== STORY(now.status)) { story = STORY(now.status); read_more(); }
});
stream.addEventListener("nodes", (event) => { now.nodes = JSON.parse(event.data); nodes(); draw(); });
stream.addEventListener("checkpoints", (event) => { now.checkpoints = JSON.parse(event.data); if (now.status) { draw(); read_more(); } });
stream.addEventListener("problem", (event) => tell(JSON.parse(event.data)));
stream.onerror = () => tell("`unbroken page` does not answer: what is shown may be old. Start it again.");
stream.onopen = () => tell("");
function tell(text) {
  at("problem").textContent = text;
  at("problem").hidden = !text;
}
at("nodes").addEventListener("click", (event) => {
  const cell = event.target.closest("button");
  if (cell) choose(cell.dataset.node);
});
at("nodes").addEventListener("keydown", move_in_grid);
at("find").addEventListener("input", () => {
  nodes();
  const found = at("nodes").querySelector(".found");
  if (found) at("nodes").scrollTop = found.offsetTop - at("nodes").offsetTop - 40;
});
at("ledger-box").addEventListener("toggle", ledger);
window.addEventListener("hashchange", follow_link);
begin_curve();
begin_ranks();
