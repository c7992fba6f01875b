// The page asks for the state once a second and draws it. Rates are differences between two answers. The figures of the
// minutes before the page was opened come from the server, which has one point every few seconds.
"use strict";

const EVERY_MS = 1000;
const HISTORY_S = 300;
const SMOOTH_S = 5; // rates are means over this many seconds: single transfers would only flicker
const REQUESTS = 25;
const SILENT_MS = 10000; // the server repeats the last answer of an engine that is silent
const NAMES = { host: "Host memory", disk: "Disk", object: "Object store", objects: "Object store" };
const COLORS = ["host", "disk", "object"]; // of the first tier, the second, the others

const states = []; // the answers of the last minutes, oldest first
let changed = 0; // when the last answer differed from the one before
const $ = (id) => document.getElementById(id);

// -- text ------------------------------------------------------------------------------------------------------------

function whole(n) {
  return Math.round(n).toLocaleString("en-US");
}

function digits(n) {
  return n >= 100 ? n.toFixed(0) : n >= 10 ? n.toFixed(1) : n.toFixed(2);
}

function bytes(n) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (n >= size) return `${digits(n / size)} ${unit}`;
  }
  return `${Math.round(n)} B`;
}

function seconds(s) {
  const size = Math.abs(s);
  if (size >= 7200) return `${digits(s / 3600)} h`;
  if (size >= 120) return `${digits(s / 60)} min`;
  if (size >= 1) return `${digits(size) * Math.sign(s)} s`;
  return `${(s * 1000).toFixed(size < 0.01 && size > 0 ? 1 : 0)} ms`;
}

function percent(part) {
  return `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;
}

// -- elements --------------------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function bar(parts, label) {
  const node = make("div", { class: "bar", role: "img", "aria-label": label, title: label });
  const all = parts.reduce((sum, [, size]) => sum + size, 0) || 1;
  for (const [kind, size] of parts) {
    if (!size) continue;
    const piece = make("i", { class: kind });
    piece.style.width = `${(100 * size) / all}%`;
    node.append(piece);
  }
  return node;
}

// -- rates -----------------------------------------------------------------------------------------------------------

function flow(state, source, target) {
  return state.flows.find((f) => f.source === source && f.target === target);
}

// The change of a figure a second, between two of the answers.
function rate(read, from, to) {
  if (!from || to.at <= from.at) return 0;
  return Math.max(0, (read(to) - read(from)) / (to.at - from.at));
}

function before(index, span) {
  const to = states[index];
  let i = index;
  while (i > 0 && to.at - states[i - 1].at <= span) i -= 1;
  return i === index && index > 0 ? states[index - 1] : states[i];
}

// -- parts of the page -----------------------------------------------------------------------------------------------

function drawHead(state) {
  const id = state.identity;
  $("what").textContent = `${id.model} on ${id.engine} ${id.engine_version}, ${id.ranks} rank${id.ranks > 1 ? "s" : ""}, up ${seconds(state.at - state.started)}`;
  $("version").textContent = `kvbm ${id.kvbm}`;
  document.title = `KVBM: ${id.model}`;
}

function colorOf(state, tier) {
  const at = state.tiers.findIndex((t) => t.tier === tier);
  return COLORS[Math.min(Math.max(at, 0), COLORS.length - 1)];
}

// What takes the place of the findings while the engine does not answer: they would be about the past.
function drawBanner(text) {
  document.body.className = "dead";
  const last = states.length ? ` The figures below are of ${new Date(states[states.length - 1].at * 1000).toLocaleTimeString()}.` : "";
  $("findings").replaceChildren(make("div", { class: "finding", "data-level": "bad", role: "alert" },
    make("p", {}, make("b", {}, "The engine does not answer."), ` ${text}${last}`)));
}

function drawFindings(state) {
  document.body.className = "";
  $("findings").replaceChildren(...state.findings.map((finding) => make(
    "div", { class: "finding", "data-level": finding.level },
    make("p", {}, finding.text),
    ...(finding.cure ? [make("p", { class: "cure" }, finding.cure)] : []),
  )));
}

const NOTHING = "–"; // for a figure that is not known

function tile(name, value, more = "") {
  return make("dl", { class: "tile" }, make("dt", {}, name), make("dd", {}, value, make("small", {}, more)));
}

function drawTiles(state) {
  const window = state.hit_rates;
  const asked = `of ${whole(window.blocks)} blocks, last ${whole(window.requests)} requests`;
  const tiles = state.tiers.map((tier) => {
    const hits = window.hits[tier.tier] || 0;
    return window.blocks ? tile(`hit rate, ${tier.tier}`, percent(hits / window.blocks), asked)
      : tile(`hit rate, ${tier.tier}`, NOTHING, "no request yet");
  });
  const saved = state.saved;
  const net = saved.saved_seconds - saved.lost_seconds;
  const mean = saved.loads ? `estimated: ${seconds(net / saved.loads)} a load, ${whole(saved.loads)} loads` : "no load yet";
  // Without a measured speed of prefill there is nothing to compare a load with.
  tiles.push(tile("time to first token saved", saved.loads && saved.measured ? seconds(net) : NOTHING,
    saved.loads && !saved.measured ? "speed of prefill not measured yet" : mean));
  const id = state.identity;
  tiles.push(tile("tokens brought back", whole(state.matched_tokens), `blocks of ${id.block_tokens} tokens, ${bytes(id.block_bytes)}`));
  const speed = saved.prefill_tokens_per_second;
  tiles.push(saved.measured ? tile("prefill", `${whole(speed)}/s`, "tokens, as measured")
    : tile("prefill", NOTHING, "not measured yet"));
  const failures = Object.values(state.failures).reduce((sum, n) => sum + n, 0);
  const reasons = Object.keys(state.failures).join("; ");
  tiles.push(tile("faults", whole(failures), failures ? reasons : "none"));
  $("tiles").replaceChildren(...tiles);
}

function drawFlow(source, target, sign) {
  const last = states.length - 1;
  const now = states[last];
  const known = flow(now, source, target);
  if (!known) return null;
  const then = before(last, SMOOTH_S);
  const value = (name) => rate((s) => (flow(s, source, target) || known)[name], then, now);
  const blocks = value("blocks");
  const queued = known.queued_blocks ? `, ${whole(known.queued_blocks)} waiting` : "";
  const text = `${digits(blocks)} blocks/s, ${bytes(value("bytes"))}/s${queued}`;
  const node = make("span", { class: blocks ? "on" : "" }, `${sign} ${source} → ${target}: `, make("b", {}, text));
  node.title = `${whole(known.blocks)} blocks, ${bytes(known.bytes)} since the start`;
  node.dataset.flow = `${source}-${target}`;
  return node;
}

// What has come from each source of a tier that has several, and what others have read here.
function drawPeers(state, tier) {
  const refusals = (each) => Object.values(each.refused).reduce((sum, n) => sum + n, 0);
  const lines = state.sources.filter((s) => s.tier === tier).sort((a, b) => b.blocks - a.blocks).slice(0, 16).map((s) => {
    const speed = s.bytes_per_second ? `, ${bytes(s.bytes_per_second)}/s` : "";
    const refused = refusals(s) ? `, ${whole(refusals(s))} refused (${Object.keys(s.refused).join(", ")})` : "";
    const text = `${whole(s.blocks)} blocks, ${bytes(s.bytes)}${speed} over ${s.path}${refused}${s.suspended ? ", suspended" : ""}`;
    return make("span", { class: s.blocks ? "on" : "" }, `← ${s.source}: `, make("b", {}, text));
  });
  for (const s of state.served.filter((each) => each.tier === tier)) {
    const refused = refusals(s) ? `, ${whole(refusals(s))} refused (${Object.keys(s.refused).join(", ")})` : "";
    lines.push(make("span", { class: s.blocks ? "on" : "" }, "→ other engines have read ",
      make("b", {}, `${whole(s.blocks)} blocks, ${bytes(s.bytes)}${refused}`)));
  }
  return lines.length ? [make("div", { class: "flow", "data-sources": tier }, ...lines)] : [];
}

function drawTiers(state) {
  const id = state.identity;
  const nodes = [make(
    "div", { class: "tier", "data-tier": "device" },
    make("div", { class: "names" }, make("b", {}, `${id.device} (the engine's own cache)`),
      make("span", {}, id.engine_blocks
        ? `${bytes(id.engine_blocks * id.block_bytes)}, ${whole(id.engine_blocks)} blocks` : "size not known")),
  )];
  const above = ["device"];
  for (const tier of state.tiers) {
    const flows = above.flatMap((upper) => [drawFlow(upper, tier.tier, "↓"), drawFlow(tier.tier, upper, "↑")]);
    nodes.push(make("div", { class: "flow" }, ...flows.filter(Boolean)));
    const used = tier.slots - tier.free;
    const others = state.sources.some((s) => s.tier === tier.tier) || state.served.some((s) => s.tier === tier.tier);
    const size = others ? "of other engines" : !tier.bounded ? `${bytes(used * tier.block_bytes)} known to this engine` : tier.slots
      ? `${bytes(used * tier.block_bytes)} of ${bytes(tier.slots * tier.block_bytes)} (${percent(used / tier.slots)})`
      : "size not known";
    const label = `${tier.tier}: ${whole(tier.idle)} kept, ${whole(tier.pinned)} being read, ${whole(tier.writing)} being written, ${whole(tier.free)} free`;
    const evicted = tier.evictions ? `, ${whole(tier.evictions)} evicted${tier.policy ? ` (${tier.policy})` : ""}` : "";
    nodes.push(make(
      "div", { class: "tier", "data-tier": tier.tier },
      make("div", { class: "names" }, make("b", {}, NAMES[tier.tier] || tier.tier), make("span", {}, `${size}${evicted}`)),
      bar(["pinned", "idle", "writing", "free"].map((kind) => [kind, tier[kind]]), label),
    ), ...drawPeers(state, tier.tier));
    above.push(tier.tier);
  }
  $("tiers").replaceChildren(...nodes);
}

function key(kind, text) {
  return make("span", {}, make("i", { class: `key ${kind}` }), text);
}

function plot(title, least, lines, show) { // a value of null is one that is not known
  const svgs = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(svgs, "svg");
  svg.setAttribute("viewBox", "0 0 300 72");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const top = Math.max(...lines.flatMap((line) => line.values), least);
  const end = states[states.length - 1].at;
  const base = document.createElementNS(svgs, "line");
  for (const [name, value] of [["x1", 0], ["x2", 300], ["y1", 71], ["y2", 71]]) base.setAttribute(name, value);
  svg.append(base);
  for (const line of lines) {
    const points = line.values.flatMap((value, i) => {
      const x = 300 - (300 * (end - states[i].at)) / HISTORY_S;
      return value === null ? [] : [`${x.toFixed(1)},${(71 - (69 * value) / top).toFixed(1)}`];
    });
    const node = document.createElementNS(svgs, "polyline");
    node.setAttribute("points", points.join(" "));
    node.style.stroke = `var(--${line.color})`;
    svg.append(node);
  }
  const last = (line) => line.values[line.values.length - 1];
  const current = lines.map((line) => `${line.name} ${last(line) === null ? "–" : show(last(line))}`);
  svg.setAttribute("aria-label", `${title}: ${current.join(", ")}`);
  return make(
    "div", { class: "plot" },
    make("p", {}, make("span", {}, title), make("b", {}, ...current.map((text, i) => key(lines[i].color, text)))), svg,
    make("p", {}, make("span", {}, "5 min ago"), make("span", {}, `full height: ${show(top)}`), make("span", {}, "now")),
  );
}

function drawHistory(state) {
  const moved = (pick) => states.map((to, i) => rate(
    (s) => s.flows.filter(pick).reduce((sum, f) => sum + f.bytes, 0), before(i, SMOOTH_S), to,
  ));
  const speed = (value) => `${bytes(value)}/s`;
  const plots = [
    plot("moved", 1, [
      { name: "↑ onboard", color: "device", values: moved((f) => f.target === "device") },
      { name: "↓ offload", color: "host", values: moved((f) => f.target !== "device") },
    ], speed),
    plot("hit rate", 1, state.tiers.map((tier) => ({
      name: tier.tier,
      color: colorOf(state, tier.tier),
      values: states.map((s) => (s.hit_rates.blocks ? (s.hit_rates.hits[tier.tier] || 0) / s.hit_rates.blocks : null)),
    })), percent),
  ];
  $("history").replaceChildren(...plots);
}

function drawLegend(state) {
  $("sources").replaceChildren(
    make("span", {}, "tokens of the prompt:"), key("device", "the engine had them"),
    ...state.tiers.map((tier) => key(colorOf(state, tier.tier), `from ${tier.tier}`)), key("compute", "computed"),
  );
}

function drawRequest(state, request) {
  const parts = [["device", request.device_tokens]];
  let left = request.loaded_tokens;
  for (const [tier, tokens] of Object.entries(request.found)) {
    const taken = Math.min(tokens, left); // in the order in which they were found
    parts.push([tier, taken]);
    left -= taken;
  }
  const rest = Math.max(0, request.prompt_tokens - request.device_tokens - request.loaded_tokens);
  parts.push(["compute", rest]);
  const label = parts.filter(([, n]) => n).map(([kind, n]) => `${whole(n)} ${kind}`).join(", ");
  const colored = parts.map(([kind, n]) => [["device", "compute"].includes(kind) ? kind : colorOf(state, kind), n]);
  const cell = (text, name) => make("td", { "data-name": name }, text);
  const saved = request.saved_seconds;
  const savedCell = cell(saved === null ? "–" : seconds(saved), "saved");
  if (saved !== null && saved < 0) savedCell.className = "loss";
  const failed = request.failed_tokens ? ` (${whole(request.failed_tokens)} tokens did not arrive)` : "";
  return make(
    "tr", { title: request.id },
    make("td", {}, new Date(request.at * 1000).toLocaleTimeString()),
    cell(whole(request.prompt_tokens), "tokens"),
    make("td", { class: "wide" }, bar(colored, label)),
    cell(request.load_seconds === null ? "–" : seconds(request.load_seconds), "loaded in"),
    savedCell,
    make("td", {}, request.why + failed),
  );
}

function draw(state) {
  drawHead(state);
  drawFindings(state);
  drawTiles(state);
  drawTiers(state);
  drawHistory(state);
  drawLegend(state);
  $("requests").replaceChildren(...state.requests.map((request) => drawRequest(state, request)));
  $("none").hidden = state.requests.length > 0;
}

// -- asking ----------------------------------------------------------------------------------------------------------

function say(kind, text) {
  const link = $("link");
  if (link.textContent !== text) link.textContent = text;
  link.dataset.state = kind;
}

async function get(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
  return answer.json();
}

// A fault of this page is not one of the engine.
function tryToDraw(state) {
  try {
    draw(state);
    return "";
  } catch (error) {
    return `this page has a fault, please report it: ${error.message}`;
  }
}

async function ask() {
  try {
    const state = await get(`/api/state?requests=${REQUESTS}`);
    if (states.length && states[states.length - 1].started !== state.started) states.length = 0; // a new engine
    if (!states.length) {
      const past = await get("/api/history");
      states.push(...past.filter((point) => point.started === state.started && point.at < state.at));
    }
    const last = states[states.length - 1];
    if (!last || last.at !== state.at) {
      changed = performance.now();
      states.push(state);
    }
    while (states.length && state.at - states[0].at > HISTORY_S) states.shift();
    const fault = tryToDraw(state);
    for (const old of states.slice(0, -1)) delete old.requests;
    const silent = performance.now() - changed;
    if (silent > SILENT_MS) {
      drawBanner(`It has been silent for ${seconds(silent / 1000)}.`);
      say("lost", "no answer");
    } else if (fault) {
      say("lost", fault);
    } else {
      say("live", "live");
    }
  } catch (error) {
    drawBanner("It has ended, or this machine cannot reach it.");
    say("lost", `not reachable: ${error.message}`);
  }
  setTimeout(ask, document.hidden ? 5 * EVERY_MS : EVERY_MS);
}

ask();
