// Draw the page. All numbers of the report come from the element #data, made by page.py.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const model = data.model;
const $ = (id) => document.getElementById(id);
const LABELS = {
  "local forward": "forward, no_sync()",
  "local backward": "backward, no_sync()",
  "optimizer step": "optimizer",
  "filling": "bucket fills",
  "waited": "full, waits for its turn",
  "late (slower ranks)": "late: waits for slower ranks",
  "wire, hidden": "on the wire, hidden",
  "wire, exposed": "on the wire, exposed",
  "values, hidden": "values come back, hidden", "values, exposed": "values come back, exposed",
};
if (data.turns) Object.assign(LABELS, { // each turn but the last one is local
  "local forward": "forward, not of the last turn",
  "local backward": "backward, not of the last turn: nothing is sent",
  "turn": "turn of a logical rank",
});
const SENDS = ["late (slower ranks)", "wire, hidden", "wire, exposed"];
const THIN = ["filling", "waited", "done, not copied out"];
const ROW = 20, GAP = 12, AXIS = 34, PAD = 8; // px

const state = {
  step: data.typical, rank: data.shown, bucket: null, // a bucket that was picked
  view: null, // [begin, end] in ns of the step; null: all of it
  change: { cap: null, bus: null, latency: null, ranks: null, half: false, balanced: false },
};

// ---------------------------------------------------------------------------- helpers

function make(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "g", "rect", "line", "text"].includes(tag);
  const node = isSvg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children); // strings become text, never markup
  return node;
}

// Rounds as Python: of two nearest numbers, to the even digit.
function fixed(number, digits) {
  const exact = number.toFixed(100), cut = exact.indexOf(".") + 1 + digits;
  const down = exact.slice(0, cut).replace(/\.$/, "");
  const isTie = /^50*$/.test(exact.slice(cut)), isEven = "02468".includes(down.slice(-1));
  return isTie && isEven ? down : number.toFixed(digits);
}

const labelOf = (kind) => LABELS[kind] || kind;
const classOf = (kind) => `k k-${kind.replace(/\W+/g, "-")}`;
const seconds = (ns) => ns / 1e9;
const ms = (s) => fixed(s * 1e3, 1).replace(/^-(0\.0)$/, "$1");
const about = (s) => `${fixed(s * 1e3, s * 1e3 >= 10 ? 0 : 1)} ms`;
const mib = (nbytes) => fixed(nbytes / MIB, 2);
const percent = (share) => `${fixed(share * 100, 0)}%`;
const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const sum = (numbers) => numbers.reduce((total, n) => total + n, 0);

// Names layers as `layers_of`: those of the first and the last parameter.
function layersOf(members) {
  const ends = [Math.min(...members), Math.max(...members)].map((i) => data.layers[i]);
  return [...new Set(ends)].join(" to ");
}

// Lists the layers of parameters with their bytes, the largest first.
function sizesOf(members, most) {
  const sizes = new Map();
  for (const i of members) {
    sizes.set(data.layers[i], (sizes.get(data.layers[i]) || 0) + data.nbytes[i]);
  }
  const sorted = [...sizes].sort((a, b) => b[1] - a[1]);
  const lines = sorted.slice(0, most).map(([layer, n]) => `${layer} ${mib(n)}`);
  const more = sorted.length - lines.length;
  return `${lines.join(", ")}${more > 0 ? `, and ${count(more, "layer")} more` : ""} (MiB)`;
}

// ------------------------------------------------------------------------- what was recorded

// Inverse of _packed in page.py: slices in ns of the step, from a moment on.
function unpack(numbers, at = 0) {
  const found = [];
  for (let i = 0; i < numbers.length; i += 2) {
    const kind = data.kinds[numbers[i]], begin = at;
    at += numbers[i + 1];
    if (kind) found.push({ kind, begin, end: at }); // else a gap
  }
  return found;
}

function bucketOf([number, full, hidden, ...packed], begin, rank, isTypical) {
  const slices = unpack(packed, full), members = data.members[number];
  const length = (start) =>
    sum(slices.filter((s) => s.kind.startsWith(start)).map((s) => s.end - s.begin));
  const filling = slices.find((slice) => slice.kind === "filling");
  const late = length("late"), wire = length("wire");
  let first = filling ? seconds(filling.begin - begin) : null;
  if (isTypical) first = data.first_s[rank][number]; // the median over steps
  const nbytes = sum(members.map((i) => data.nbytes[i]));
  return {
    number, slices, members, nbytes, first, full: seconds(full - begin),
    waited: seconds(length("waited")), late: seconds(late), wire: seconds(wire),
    hidden: seconds(hidden), exposed: seconds(late + wire - hidden),
  };
}

function totalsOf(step, rank) {
  const { totals } = data.steps[step].ranks[rank];
  return Object.fromEntries(data.totals.map((name, n) => [name, totals[n]]));
}

function recorded(step, rank) {
  const one = data.steps[step].ranks[rank];
  const isTypical = step === data.typical;
  return {
    phases: unpack(one.phases), backward: one.backward,
    values: one.values.map(([kind, bucket, begin, end]) => ({ kind: data.kinds[kind], bucket: bucket ?? undefined, begin, end })),
    turns: one.turns.map(([number, begin, end]) => ({ kind: "turn", number, begin, end })),
    totals: totalsOf(step, rank),
    buckets: one.buckets.map((each) => bucketOf(each, one.backward[0], rank, isTypical)),
  };
}

// ------------------------------------------------------------------------------- drawing

// Draws rows of bars below a time axis. lanes: [{label, onpick, isOpen, ends, rows}],
// rows: [{label, bars: [{kind, begin, end, text, bucket, tip}]}]; times in ns.
function draw(place, lanes, [from, to], title) {
  const width = place.clientWidth, left = width < 560 ? 74 : 104;
  const scale = (width - left - PAD) / (to - from || 1);
  const at = (ns) => left + (ns - from) * scale;
  const height = AXIS + sum(lanes.map((lane) => lane.rows.length * ROW + GAP));
  const svg = make("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "presentation" });
  for (const ns of ticks(from, to, (width - left) / 80)) {
    const x = at(ns);
    svg.append(make("line", { class: "grid", x1: x, x2: x, y1: AXIS - 6, y2: height }));
    const anchor = x > width - 30 ? "end" : "middle";
    svg.append(make("text", { class: "soft", x, y: AXIS - 13, "text-anchor": anchor }, tick(ns, to - from)));
  }
  svg.append(make("text", { class: "soft", x: 0, y: AXIS - 13 }, "ms"));
  let y = AXIS;
  for (const lane of lanes) {
    const tall = lane.rows.length * ROW;
    svg.append(make("rect", { class: "lane", x: left, y, width: width - left - PAD, height: tall, opacity: 0.6 }));
    lane.rows.forEach((row, n) => {
      const middle = y + n * ROW + ROW / 2;
      const label = n ? row.label : lane.label;
      const mark = n || !lane.onpick ? "" : lane.isOpen ? "\u25be " : "\u25b8 ";
      const text = make("text", { x: n ? 10 : 0, y: middle, class: n ? "soft" : "strong" }, `${mark}${label}`);
      const area = make("rect", { x: 0, y, width: left - 6, height: ROW, fill: "transparent" });
      svg.append(mark ? button(`buckets of ${label}`, lane.isOpen, lane.onpick, area, text) : text);
      for (const bar of row.bars) drawBar(svg, bar, { at, y: y + n * ROW + 2, left, right: width - PAD });
    });
    for (const ns of lane.ends || []) {
      const x = at(ns);
      if (x >= left && x <= width - PAD) svg.append(make("line", { class: "end", x1: x, x2: x, y1: y, y2: y + tall }));
    }
    y += tall + GAP;
  }
  svg.setAttribute("aria-label", title);
  swap(place, svg);
  place.left = left;
}

// Replaces the picture in a place; the same button keeps the focus.
function swap(place, svg) {
  const label = place.contains(document.activeElement) && document.activeElement.getAttribute("aria-label");
  place.replaceChildren(svg);
  for (const g of svg.querySelectorAll("[role=button]")) {
    if (g.getAttribute("aria-label") === label) g.focus();
  }
}

function button(label, isPressed, act, ...children) {
  const g = make("g", { role: "button", tabindex: 0, "aria-pressed": isPressed, "aria-label": label }, ...children);
  g.addEventListener("click", act);
  g.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    act();
  });
  return g;
}

function drawBar(svg, bar, { at, y, left, right }) {
  const x = Math.max(left, at(bar.begin)), end = Math.min(right, at(bar.end));
  if (end < left || x > right) return;
  if (THIN.includes(bar.kind) && end - x < 1) return; // would look like dust
  const width = Math.max(1, end - x);
  const thin = THIN.includes(bar.kind) ? 5 : 0;
  const rect = make("rect", { class: classOf(bar.kind), x, y: y + thin, width, height: ROW - 4 - 2 * thin });
  const drawn = [rect];
  rect.tip = bar.tip;
  if (bar.text && !thin && width > 6.5 * bar.text.length + 4) {
    const wide = 6.2 * bar.text.length + 6, middle = x + width / 2;
    const plate = { class: "plate", x: middle - wide / 2, y: y + 2, width: wide, height: ROW - 8, rx: 3 };
    if (/exposed|late|optimizer/.test(bar.kind)) drawn.push(make("rect", plate)); // on hatching
    drawn.push(make("text", { class: "on", x: middle, y: y + ROW / 2 - 2 }, bar.text));
  }
  if (bar.bucket !== undefined) drawn.forEach((node) => { node.dataset.bucket = bar.bucket; });
  svg.append(...drawn);
}

function ticks(from, to, most) {
  const rough = (to - from) / Math.max(2, most), power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].find((n) => n * power >= rough) * power;
  const found = [];
  for (let n = Math.ceil(from / step); n * step <= to; n++) found.push(n * step);
  return found;
}

function tick(ns, range) {
  const digits = Math.max(0, Math.ceil(-Math.log10(range / 1e6 / 10)));
  return (ns / 1e6).toFixed(Math.min(digits, 4));
}

// ------------------------------------------------------------------------- the timeline

function tipOf(slice, rank, bucket) {
  const what = `${labelOf(slice.kind)}: ${ms(seconds(slice.end - slice.begin))} ms`;
  const when = `from ${ms(seconds(slice.begin))} to ${ms(seconds(slice.end))} ms`;
  if (!bucket) return `rank ${data.ranks[rank]}\n${what}\n${when}`;
  return `bucket ${bucket.number}, rank ${data.ranks[rank]}: ${mib(bucket.nbytes)} MiB\n${what}\n${when}\n` +
    `${layersOf(bucket.members)}\n${sizesOf(bucket.members, 5)}`;
}

function barsOf(one, rank) {
  const names = data.turns ? { "local forward": "forward", "local backward": "backward" } : {};
  const computes = one.phases.map((s) => ({ ...s, text: names[s.kind] || labelOf(s.kind), tip: tipOf(s, rank) }));
  const rows = one.buckets.map((bucket) => ({
    label: `bucket ${bucket.number}`,
    bars: bucket.slices.map((s) => ({
      ...s, text: ms(seconds(s.end - s.begin)), bucket: bucket.number, tip: tipOf(s, rank, bucket),
    })),
  }));
  const sends = rows.flatMap((row) => row.bars.filter((bar) => SENDS.includes(bar.kind)));
  const sent = { label: "network", bars: sends.map((bar) => ({ ...bar, text: `${bar.bucket}` })) };
  const whose = (s) => (s.bucket === undefined ? "" : `\nbucket ${s.bucket}`); // hidden ones are of all together
  const back = one.values.map((s) => ({ ...s, text: `${s.bucket ?? ""}`, tip: tipOf(s, rank) + whose(s) }));
  return { computes, rows, sent, values: { label: "values", bars: back } };
}

// The first rows of a rank: all that it computes, or a row for each logical rank below its turns.
function rowsOf({ computes }, { turns }, rank) {
  const isIn = (bar, turn) => turn.begin <= bar.begin && bar.end <= turn.end;
  const rest = computes.filter((bar) => !turns.some((turn) => isIn(bar, turn)));
  const band = turns.map((turn) => ({
    ...turn, text: `logical ${turn.number}`, tip: tipOf(turn, rank).replace("\n", `, logical rank ${turn.number}\n`),
  }));
  const own = turns.map((turn) => ({
    label: `logical ${turn.number}`,
    bars: computes.filter((bar) => isIn(bar, turn))
      .map((bar) => ({ ...bar, tip: bar.tip.replace("\n", `, logical rank ${turn.number}\n`) })),
  }));
  return [{ bars: [...band, ...rest] }, ...own];
}

function whole() {
  const ranks = data.steps[state.step].ranks.map((_, rank) => recorded(state.step, rank));
  const phases = ranks.flatMap((one) => [...one.phases, ...one.turns]), begin = Math.min(...phases.map((s) => s.begin));
  const end = Math.max(...ranks.map((one) => begin + one.totals.seconds * 1e9), ...phases.map((s) => s.end));
  return { ranks, limits: [begin, end] };
}

function drawTimeline() {
  const { ranks, limits } = whole();
  const lanes = ranks.map((one, rank) => {
    const bars = barsOf(one, rank), isOpen = rank === state.rank;
    const label = `rank ${data.ranks[rank]}`;
    const onpick = () => show({ rank });
    return { label, onpick, isOpen, ends: [one.backward[1]], rows: [...rowsOf(bars, one, rank), ...(isOpen ? bars.rows : [bars.sent]), ...(data.values ? [bars.values] : [])] };
  });
  draw($("timeline"), lanes, state.view || limits, `step ${data.steps[state.step].number}`);
  highlight();
}

// Dims all other buckets: one that the pointer or the focus is on, or the picked one.
function highlight(number = state.bucket) {
  for (const rect of document.querySelectorAll("#timeline [data-bucket]")) {
    rect.classList.toggle("dim", number !== null && rect.dataset.bucket !== `${number}`);
  }
  for (const row of document.querySelectorAll("#buckets tbody tr")) {
    row.classList.toggle("chosen", row.dataset.bucket === `${number}`);
    row.setAttribute("aria-selected", row.dataset.bucket === `${state.bucket}`);
  }
  describe(number);
}

function describe(number) {
  const one = recorded(state.step, state.rank);
  const bucket = one.buckets.find((each) => each.number === number);
  if (!bucket) {
    const more = data.ranks.length > 1 ? " Dotted purple: waiting for slower ranks." : "";
    $("detail").textContent =
      "Pick a bucket to see its layers. Dashed line: the end of the backward; what waits or is on the wire after it is exposed, " +
      `and makes the step longer.${more}`;
    return;
  }
  const after = one.totals.backward_s - bucket.full;
  $("detail").textContent =
    `Bucket ${number} on rank ${data.ranks[state.rank]}, step ${data.steps[state.step].number}: ` +
    `${mib(bucket.nbytes)} MiB, ${count(bucket.members.length, "parameter")}, ${layersOf(bucket.members)}. ` +
    `Full ${ms(Math.max(0, after))} ms before the backward ends; waits ${ms(bucket.waited)} ms, ` +
    (data.ranks.length > 1 ? `then ${ms(bucket.late)} ms for slower ranks; ` : "") +
    `${ms(bucket.wire)} ms on the wire; hidden ${ms(bucket.hidden)} ms, exposed ${ms(bucket.exposed)} ms. ` +
    `Layers: ${sizesOf(bucket.members, 100)}.`;
}

function zoom(factor, center) {
  const limits = whole().limits, [a, b] = state.view || limits;
  const middle = center === undefined ? (a + b) / 2 : center;
  setView([middle - (middle - a) * factor, middle + (b - middle) * factor]);
}

function setView([a, b]) {
  const [low, high] = whole().limits, length = Math.min(Math.max(b - a, 1000), high - low);
  const begin = Math.min(Math.max(a, low), high - length);
  state.view = length >= high - low ? null : [begin, begin + length];
  drawTimeline();
}

function pan(share) {
  const [a, b] = state.view || whole().limits;
  setView([a + share * (b - a), b + share * (b - a)]);
}

function listenToTimeline() {
  const place = $("timeline"), pointers = new Map();
  const timeAt = (x) => {
    const box = place.getBoundingClientRect(), [a, b] = state.view || whole().limits;
    return a + ((x - box.left - place.left) / (box.width - place.left - PAD)) * (b - a);
  };
  let moved = 0;
  place.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event.clientX));
  }, { passive: false });
  place.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.clientX);
    moved = 0;
  });
  window.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return;
    const before = [...pointers.values()], move = event.clientX - pointers.get(event.pointerId);
    pointers.set(event.pointerId, event.clientX);
    moved += Math.abs(move);
    const now = [...pointers.values()], width = place.clientWidth - place.left - PAD;
    if (now.length === 1 && moved > 4) pan(-move / width);
    if (now.length === 2) {
      const spread = (pair) => Math.max(10, Math.abs(pair[0] - pair[1]));
      zoom(spread(before) / spread(now), timeAt((now[0] + now[1]) / 2));
    }
  });
  for (const name of ["pointerup", "pointercancel"]) {
    window.addEventListener(name, (event) => pointers.delete(event.pointerId));
  }
  place.addEventListener("click", (event) => {
    const number = event.target.dataset?.bucket;
    if (moved <= 4 && number !== undefined) pick(Number(number));
  });
  place.addEventListener("pointerover", (event) => {
    if (event.target.dataset?.bucket !== undefined) highlight(Number(event.target.dataset.bucket));
  });
  place.addEventListener("pointerleave", () => highlight());
  place.addEventListener("keydown", (event) => {
    const keys = {
      "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "0": () => setView([-Infinity, Infinity]),
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
}

function listenToTips() {
  const tip = $("tip");
  document.addEventListener("pointermove", (event) => {
    tip.hidden = !event.target.tip;
    if (tip.hidden) return;
    tip.textContent = event.target.tip;
    const box = tip.getBoundingClientRect();
    const x = Math.min(event.clientX + 14, innerWidth - box.width - 6);
    const below = event.clientY + 18, fits = below + box.height < innerHeight;
    tip.style.left = `${Math.max(6, x)}px`;
    tip.style.top = `${fits ? below : Math.max(6, event.clientY - box.height - 12)}px`;
  });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
}

function drawStrip() {
  const place = $("strip"), width = place.clientWidth, height = 80, top = 14;
  const svg = make("svg", { height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const totals = data.steps.map((_, n) => totalsOf(n, state.rank));
  const longest = totals.reduce((best, each, n) => (each.seconds > totals[best].seconds ? n : best), 0);
  const most = totals[longest].seconds || 1;
  const slot = (width - 2 * PAD) / Math.max(1, data.steps.length - 1); // as the slider's thumb
  totals.forEach((each, n) => {
    const tall = (s) => ((height - top) * s) / most;
    const wide = Math.min(2 * PAD, Math.max(1, slot - 1)), x = PAD + n * slot - wide / 2;
    const tip = `step ${data.steps[n].number}, rank ${data.ranks[state.rank]}: ${ms(each.seconds)} ms, exposed ${ms(each.exposed_s)} ms`;
    const parts = [["k k-rest", tall(each.seconds)], ["k k-wire-exposed", tall(each.exposed_s)]];
    for (const [name, high] of parts) {
      const isPicked = n === state.step && !name.endsWith("exposed");
      const rect = make("rect", { class: `${name}${isPicked ? " picked" : ""}`, x, y: height - high, width: wide, height: high });
      rect.tip = tip;
      rect.addEventListener("click", () => show({ step: n }));
      svg.append(rect);
    }
  });
  svg.append(make("text", { class: "soft", x: 0, y: 6 }, `${ms(most)} ms: the longest, step ${data.steps[longest].number}`));
  place.replaceChildren(svg);
}

// ---------------------------------------------------------------------------- tables

function table(place, rows, mark = () => ({})) {
  const [head, ...body] = rows;
  const row = (cells, tag, n) => make("tr", n === undefined ? {} : mark(n), ...cells.map((cell, k) =>
    make(k ? tag : "th", { scope: tag === "th" ? "col" : k ? "" : "row" }, cell)));
  place.replaceChildren(
    make("thead", {}, row(head, "th")), make("tbody", {}, ...body.map((cells, n) => row(cells, "td", n))));
}

function drawBuckets() {
  const one = recorded(state.step, state.rank), isAlone = data.ranks.length === 1;
  const names = ["first", "full", "waited", "late", "wire", "hidden", "exposed"].filter((n) => !isAlone || n !== "late");
  const rows = one.buckets.map((bucket) => [
    `${bucket.number}`, `${bucket.members.length}`, mib(bucket.nbytes),
    ...names.map((name) => (bucket[name] === null ? "-" : ms(bucket[name]))), layersOf(bucket.members),
  ]);
  const focused = document.activeElement.closest?.("#buckets tr")?.dataset.bucket;
  table($("buckets"), [["bucket", "params", "MiB", ...names, "layers"], ...rows],
    (n) => ({ "data-bucket": one.buckets[n].number, tabindex: n ? -1 : 0 }));
  const most = Math.max(...one.buckets.map((bucket) => bucket.exposed));
  one.buckets.forEach((bucket, n) => {
    const row = $("buckets").tBodies[0].rows[n];
    if (most > 0 && bucket.exposed === most) row.cells[2 + names.length].className = "most";
    row.addEventListener("click", () => pick(bucket.number));
    row.addEventListener("focus", () => highlight(bucket.number));
    row.addEventListener("blur", () => highlight());
    row.addEventListener("pointerenter", () => highlight(bucket.number));
    row.addEventListener("pointerleave", () => highlight());
    if (focused === `${bucket.number}`) row.focus();
  });
  $("about-buckets").textContent =
    `Times in ms, of rank ${data.ranks[state.rank]} in step ${data.steps[state.step].number}. ` +
    "Underlined: the most exposed one. Click a row, or walk with the arrow keys, to see the bucket in the timeline.";
}

function walkBuckets(event) {
  const row = event.target.closest("tr[data-bucket]");
  const next = row && { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
  if (row && (event.key === "Enter" || event.key === " ")) pick(Number(row.dataset.bucket));
  else if (next) {
    row.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  } else return;
  event.preventDefault();
}

function drawSplit() {
  const { totals } = recorded(state.step, state.rank), isTypical = state.step === data.typical;
  const parts = data.phases.map((name, n) => [name, totals[data.totals[n + 3]]]);
  const rows = parts.filter(([name, s]) => s || !data.rare.some((word) => name.startsWith(word)))
    .map(([name, s]) => [name, `${ms(s)} ms`, percent(totals.seconds ? s / totals.seconds : 0)]);
  table($("split"), [["", "time", "share"], ...rows]);
  const spread = isTypical ? ` (${data.spread[state.rank]} of ${count(data.num_steps, "step")})` : "";
  $("about-split").textContent =
    `Step ${data.steps[state.step].number} on rank ${data.ranks[state.rank]}: ${ms(totals.seconds)} ms${spread}. ` +
    `The backward hides ${ms(totals.hidden_s)} ms of communication.` +
    (totals.late_s ? ` Of hidden and exposed, ${ms(totals.late_s)} ms are waiting for slower ranks.` : "");
}

function drawTiles() {
  const { totals } = recorded(data.typical, data.shown), all = totals.hidden_s + totals.exposed_s;
  const name = `typical step: ${data.steps[data.typical].number}, on rank ${data.ranks[data.shown]}; of all: ${data.spread[data.shown]}`;
  const tiles = [[name, `${ms(totals.seconds)} ms`]];
  if (all) tiles.push(
    ["of communication is hidden", percent(totals.hidden_s / all)],
    ["communication is exposed", `${ms(totals.exposed_s)} ms`],
    ["of the step is exposed communication", percent(totals.seconds ? totals.exposed_s / totals.seconds : 0)]);
  $("tiles").append(...tiles.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function drawOptional(name) { // a sentence and a table, in a section of their own
  const [sentence, rows] = data[name] || ["", [[]]];
  $(`of-${name}`).hidden = !data[name];
  $(`about-${name}`).textContent = sentence;
  table($(name), rows);
}

function drawSkew() {
  const [rows, notes] = data.skew;
  table($("skew"), rows);
  $("latest").textContent = data.latest;
  $("skew").after(...notes.map((note) => make("p", { class: "note" }, note)));
  rows.slice(1).forEach((row, n) => {
    const k = rows[0].indexOf(row[1]);
    if (k > 0) $("skew").tBodies[0].rows[n].cells[k].className = "most";
  });
}

// ------------------------------------------------------------------------------ what if?

const BITS = 8 / 1e9; // bytes/s -> Gbit/s

// A slider has a list of values; null: as recorded, in its place by size.
function between(values, recordedValue) {
  const found = values.filter((value) => Math.abs(value / recordedValue - 1) > 0.02);
  return [...found.filter((v) => v < recordedValue), null, ...found.filter((v) => v > recordedValue)];
}

function decades(from, to) {
  const found = [];
  for (let power = from; power < to; power++) {
    for (const n of [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8]) found.push(Number((n * 10 ** power).toPrecision(2)));
  }
  return [...found, 10 ** to];
}

function short(number, digits = 3) {
  return number < 999.5 ? `${Number(number.toPrecision(digits))}` : number.toFixed(0);
}

// Values are in the unit that is shown; times factor they are those of a change.
function slidersOf() {
  const { latency_s, bytes_per_s } = model.network;
  const bus = bytes_per_s * bytesOnBus(model.ranks) * BITS, latency = latency_s * 1e3;
  const ranks = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024];
  const times = [...(latency ? [0] : []), ...decades(-3, 2)];
  return [
    { key: "cap", name: "Bucket cap", unit: " MiB", values: [null, ...model.caps],
      now: count(model.groups.length, "bucket"), factor: 1 },
    { key: "bus", name: "Bandwidth per rank", unit: " Gbit/s", values: between(decades(-1, 3), bus),
      now: `${short(bus)} Gbit/s`, factor: 1 / BITS },
    { key: "latency", name: "Latency of a bucket", unit: " ms", values: between(times, latency),
      now: `${short(latency, 2)} ms`, factor: 1e-3 },
    { key: "ranks", name: "Ranks", unit: "", values: between(ranks, model.ranks), now: `${model.ranks}`, factor: 1 },
  ];
}

function makeSliders() {
  for (const slider of slidersOf()) {
    const input = make("input", { type: "range", id: `s-${slider.key}`, min: 0, max: slider.values.length - 1, step: 1 });
    const output = make("output", { for: input.id });
    const toChange = (value) => (value === null ? null : value * slider.factor);
    slider.refresh = () => {
      const place = slider.values.findIndex((value) => toChange(value) === state.change[slider.key]);
      const value = slider.values[place];
      input.value = place;
      output.textContent = value === null ? `as recorded: ${slider.now}` : `${short(value)}${slider.unit}`;
      input.setAttribute("aria-valuetext", output.textContent);
    };
    input.addEventListener("input", () => change({ [slider.key]: toChange(slider.values[input.value]) }));
    makeSliders.all.push(slider);
    $("sliders").append(make("div", {}, make("label", { for: input.id }, make("span", {}, slider.name), output), input));
  }
  if (model.allows_hook) makeCheck("half", "Send half the bytes (fp16_compress_hook)");
  if (model.balance_s > 0) makeCheck("balanced", "Balance the load: no rank is late at the last bucket");
}
makeSliders.all = [];

function makeCheck(key, name) {
  const box = make("input", { type: "checkbox", id: `s-${key}` });
  box.addEventListener("change", () => change({ [key]: box.checked }));
  $("sliders").append(make("label", { class: "check", for: box.id }, box, name));
  makeSliders.all.push({ refresh: () => { box.checked = state.change[key]; } });
}

function changeOf(gain_s) {
  const share = percent(Math.abs(gain_s) / model.step_s);
  return share === "0%" ? "the same" : `${share} ${gain_s < 0 ? "longer" : "shorter"}`;
}

function makePresets() {
  const nothing = { ...state.change }, fast = slidersOf()[1].values.includes(10) ? 10 * (1 / BITS) : null;
  preset("As recorded", () => nothing);
  const best = preset("", () => ({ cap: bestCap(model, state.change).cap }));
  preset("10 Gbit/s", () => ({ ...nothing, bus: fast }));
  makeSliders.all.push({ refresh: () => {
    const { cap, gain_s } = bestCap(model, state.change);
    best.textContent = `Best cap here: ${cap} MiB (${changeOf(gain_s)})`;
  } });
}

function preset(name, settings) {
  const node = make("button", { type: "button" }, name);
  node.addEventListener("click", () => change(settings()));
  $("presets").append(node);
  return node;
}

function change(settings) {
  Object.assign(state.change, settings);
  drawForecast();
}

function drawForecast() {
  for (const slider of makeSliders.all) slider.refresh();
  const found = predict(model, state.change), isNow = Object.values(state.change).every((v) => !v && v !== 0);
  $("predicted").textContent = isNow
    ? `As recorded: ${about(model.step_s)} per step, ${about(model.exposed_s)} exposed`
    : `Predicted ${about(found.step_s)} instead of ${about(model.step_s)} per step ` +
      `(${changeOf(found.gain_s)}), ${about(found.exposed_s)} exposed instead of ${about(model.exposed_s)}`;
  const { latency_s, bytes_per_s } = networkOf(model, state.change);
  const onBus = bytesOnBus(state.change.ranks || model.ranks), bus = bytes_per_s * onBus;
  const times = onBus * (state.change.half ? 0.5 : 1);
  $("predicted-more").textContent =
    `${count(found.schedule.buckets.length, "bucket")}; each takes ${short(latency_s * 1e3, 2)} ms + ` +
    `${times === 1 ? "" : `${short(times)} times `}its bytes at ${short(bus / 1e9)} GB/s (${short(bus * BITS)} Gbit/s). ` +
    `Recorded steps differ, too: ${data.spread[data.shown]} ms.`;
  const asRecorded = play(model.backward, model.groups, model.network).exposed_s;
  const isWeak = asRecorded < model.exposed_s / 2;
  $("about-forecast").textContent =
    `In ms after the backward began; recorded: step ${data.steps[data.typical].number}. The network alone would have exposed ` +
    `${ms(asRecorded)} ms; ${ms(model.exposed_s)} ms were measured.` +
    (asRecorded < model.exposed_s ? " Dotted in the predicted lane: the rest, slow ranks above all; it stays as it was." : "") +
    (isWeak ? " Most of what was exposed is not the network's: these predictions say little." : "");
  drawBeside(found);
  drawCaps();
}

// Draws the recorded typical step and the predicted one on a common axis.
function drawBeside({ schedule, exposed_s }) {
  const one = recorded(data.typical, data.shown), [begin, end] = one.backward;
  const move = (bar) => ({ ...bar, begin: bar.begin - begin, end: bar.end - begin, bucket: undefined });
  const { computes, sent } = barsOf(one, data.shown);
  const { end_s } = model.backward, row = [];
  schedule.buckets.forEach(({ group, nbytes, full, start, done }, number) => {
    const members = group.map((k) => model.backward.order[k]);
    const tip = `predicted bucket ${number}: ${mib(nbytes)} MiB are sent\nfull at ${ms(full)} ms, on the wire from ${ms(start)} to ${ms(done)} ms\n` +
      `${layersOf(members)}\n${sizesOf(members, 5)}`;
    const cut = Math.min(Math.max(start, end_s), done);
    const pieces = [["wire, hidden", start, cut], ["wire, exposed", cut, done]].filter((p) => p[1] < p[2]);
    row.push(...pieces.map(([kind, a, b]) => ({ kind, begin: a * 1e9, end: b * 1e9, text: `${number}`, tip })));
  });
  const last_s = Math.max(end_s, ...schedule.buckets.map(({ done }) => done)), rest_s = exposed_s - schedule.exposed_s;
  if (rest_s > 0) {
    const tip = `${ms(rest_s)} ms were exposed for other reasons than the network, slow ranks above all`;
    row.push({ kind: "late (slower ranks)", begin: last_s * 1e9, end: (last_s + rest_s) * 1e9, text: "rest", tip });
  }
  const backward = { kind: "backward", begin: 0, end: end_s * 1e9, text: "median backward", tip: `backward: ${ms(end_s)} ms, the median over steps` };
  const lanes = [
    { label: "recorded", ends: [end - begin], rows: [{ bars: computes.filter((b) => b.kind === "backward").map(move) }, { label: "network", bars: sent.bars.map(move) }] },
    { label: "predicted", ends: [end_s * 1e9], rows: [{ bars: [backward] }, { label: "network", bars: row }] },
  ];
  const last = Math.max(...lanes.flatMap((lane) => lane.rows.flatMap((r) => r.bars.map((bar) => bar.end))));
  draw($("forecast"), lanes, [0, 1.01 * last], "recorded and predicted");
}

function drawCaps() {
  const place = $("caps"), width = place.clientWidth, height = 140, foot = 22, top = 18;
  const svg = make("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "predicted step by bucket cap" });
  const caps = [null, ...model.caps], found = caps.map((cap) => predict(model, { ...state.change, cap }));
  const most = Math.max(...found.map((each) => each.step_s)), slot = width / caps.length;
  found.forEach((each, n) => {
    const tall = (s) => ((height - foot - top) * s) / most, base = height - foot;
    const wide = Math.max(2, Math.min(slot - 4, 64)), middle = (n + 0.5) * slot, x = middle - wide / 2;
    const name = caps[n] === null ? "recorded" : `${caps[n]} MiB`;
    const isNow = state.change.cap === caps[n], outline = isNow ? "k picked" : "k";
    const g = button(`cap ${name}`, isNow, () => change({ cap: caps[n] }),
      make("rect", { class: `${outline} k-rest`, x, y: base - tall(each.step_s), width: wide, height: tall(each.step_s) }),
      make("rect", { class: "k k-wire-exposed", x, y: base - tall(each.exposed_s), width: wide, height: tall(each.exposed_s) }),
      make("text", { x: middle, y: base - tall(each.step_s) - 9, "text-anchor": "middle" }, about(each.step_s).replace(" ms", "")),
      make("text", { class: "soft", x: middle, y: base + 10, "text-anchor": "middle" }, caps[n] === null ? "as is" : `${caps[n]}`));
    for (const rect of g.querySelectorAll("rect")) rect.tip = `cap ${name}: predicted ${about(each.step_s)} per step, ${about(each.exposed_s)} exposed`;
    svg.append(g);
  });
  swap(place, svg);
}

function aboutModel() {
  $("about-model").textContent =
    `Computed in this page from the median backward of rank ${data.ranks[data.shown]} and a network fitted to what was ` +
    "recorded. What slow ranks cost stays as it was, unless you balance the load. Other numbers of ranks: in a ring, where bytes and latency grow with " +
    "their number." +
    (model.is_one_size ? " All recorded messages have one size: their latency is unknown and counts as 0, so small caps look better than they are." : "") +
    (model.shares_memory ? " These ranks share the memory of one host: for a network between hosts set bandwidth and latency." : "");
}

// -------------------------------------------------------------------------------- start

function pick(number) {
  state.bucket = state.bucket === number ? null : number;
  highlight();
}

function show(what) { // {step} or {rank}
  Object.assign(state, what);
  drawRecorded();
}

function drawRecorded() {
  const isTypical = state.step === data.typical;
  $("rank").value = state.rank;
  $("step").value = state.step;
  $("step-number").textContent = `${data.steps[state.step].number}${isTypical ? " (typical)" : ""}`;
  $("step").setAttribute("aria-valuetext", $("step-number").textContent);
  $("to-typical").disabled = isTypical;
  drawStrip();
  drawBuckets();
  drawSplit();
  drawTimeline();
}

function drawLegend() {
  const ranks = data.ranks.map((_, rank) => recorded(data.typical, rank));
  const slices = ranks.flatMap((one) => [...one.phases, ...one.turns, ...one.values, ...one.buckets.flatMap((b) => b.slices)]);
  const used = new Set(slices.map((slice) => slice.kind));
  for (const kind of data.kinds.filter((each) => used.has(each))) {
    const svg = make("svg", { viewBox: "0 0 26 14", "aria-hidden": "true" });
    svg.append(make("rect", { class: classOf(kind), width: 26, height: 14 }));
    $("legend").append(make("li", {}, svg, labelOf(kind)));
  }
}

function start() {
  document.querySelector("main").hidden = false;
  const clocks = data.clocks_known ? "" : " The clocks of some hosts are unknown: their ranks begin at 0 of their own.";
  const some = data.steps.length < data.num_steps ? ` Here are ${data.steps.length} of them.` : "";
  $("about-steps").textContent =
    `All ranks in one step, in ms after the first of them began.${clocks} ` +
    `${count(data.num_steps, "step")} ${data.num_steps === 1 ? "was" : "were"} recorded with the same buckets.${some} ` +
    "Bars: length of each step, hatched: exposed.";
  $("rank").append(...data.ranks.map((rank, n) => make("option", { value: n }, `rank ${rank}`)));
  $("step").max = data.steps.length - 1;
  $("step").addEventListener("input", (event) => show({ step: Number(event.target.value) }));
  $("rank").addEventListener("change", (event) => show({ rank: Number(event.target.value) }));
  const clicks = {
    "to-typical": () => show({ step: data.typical }), "zoom-in": () => zoom(0.7), "zoom-out": () => zoom(1 / 0.7),
    "pan-left": () => pan(-0.2), "pan-right": () => pan(0.2),
    "zoom-all": () => setView([-Infinity, Infinity]),
  };
  for (const [id, act] of Object.entries(clicks)) $(id).addEventListener("click", act);
  $("buckets").addEventListener("keydown", walkBuckets);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") { state.bucket = null; highlight(); } });
  $("of-buckets").hidden = !data.members.length || !recorded(data.typical, data.shown).buckets.length;
  $("of-network").hidden = !data.network.length;
  $("network").append(...data.network.map((line) => make("p", {}, line)));
  $("what-if").hidden = !model;
  $("of-skew").hidden = !data.skew;
  for (const name of ["turns", "values"]) drawOptional(name);
  drawLegend();
  drawTiles();
  if (data.skew) drawSkew();
  if (model) { aboutModel(); makeSliders(); makePresets(); }
  listenToTimeline();
  listenToTips();
  const redraw = () => { drawRecorded(); if (model) drawForecast(); };
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== width) redraw();
    width = document.body.clientWidth;
  }).observe(document.body);
  redraw();
}

if (data.steps.length) start();
