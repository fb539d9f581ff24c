// What the reader does: mouse, keys, the toolbar; and the state of the page as data attributes.
const box = byId("chart");
let drag = null;

// What is under a point of the window: the chart, the rank, the time, and a cell (else -1); null outside of lanes.
function under({ x, y }) {
  const bounds = canvas.getBoundingClientRect();
  const lane = x - bounds.left >= GUTTER && y - bounds.top >= ROWS.axis ? laneAt(y - bounds.top) : null;
  if (!lane) return null;
  const time = timeOf(x - bounds.left);
  const isCell = !lane.onPhases && lane.onStrip < 0;
  return { ...lane, time, cell: isCell ? cellAt(charts[lane.number], lane.rank, time) : -1 };
}

function describe({ number, rank, time, cell, onPhases, onStrip }) {
  const chart = charts[number];
  if (onPhases) return describePhase(chart, rank, time);
  if (cell >= 0) return describeCell(chart, cell);
  if (onStrip >= 0) {
    const work = workAt(chart, rank, onStrip, time);
    return work >= 0 ? describeWork(chart, work) : null;
  }
  const gap = gapAt(chart, rank, time);
  return gap >= 0 ? describeGap(chart, gap) : null;
}

// The tooltip belongs to the pointer: keys hide it, until the pointer moves again.
let pointer = null;

function showUnderPointer() {
  const place = pointer && under(pointer);
  showTip(place && describe(place), pointer?.x, pointer?.y);
}

function forgetPointer() {
  if (pointer) pointer.forgotten = true;
  showTip(null);
}

function choose(number, cell) {
  const ops = opsOf(charts[number], cell);
  chosen.chart = number;
  chosen.cell = cell;
  if (!ops.some((op) => op.microbatch === chosen.microbatch)) setMicrobatch(ops[0].microbatch);
  fillLines(byId("details"), describeCell(charts[number], cell));
  redraw();
}

function setMicrobatch(microbatch) {
  chosen.microbatch = microbatch;
  byId("microbatch").value = microbatch < 0 ? "" : microbatch;
  redraw();
}

function clear() {
  chosen.chart = chosen.cell = -1;
  byId("details").replaceChildren();
  setMicrobatch(-1);
}

function toggle(name) {
  chosen[name] = !chosen[name];
  byId(name).checked = chosen[name];
  redraw();
}

// From the chosen cell to its neighbour on the rank, or to the one at its time on another rank.
function walk(along, across) {
  if (chosen.cell < 0) return choose(0, charts[0].rankStart.findIndex((_, rank) => charts[0].rankStart[rank + 1] > 0));
  const chart = charts[chosen.chart];
  const rank = rankOf(chart, chosen.cell);
  const target = Math.min(Math.max(rank + across, 0), chart.ranks - 1);
  const [low, high] = [chart.rankStart[target], chart.rankStart[target + 1] - 1];
  const { start, end } = chart.cells;
  const time = start[chosen.cell];
  const near = across ? firstWhere(low, high, (cell) => end[cell] > time) : chosen.cell + along;
  if (high < low) return;
  choose(chosen.chart, Math.min(Math.max(near, low), high));
  reveal(chosen.chart, chosen.cell);
}

function walkToProducer() {
  const producer = chosen.cell < 0 ? -1 : charts[chosen.chart].cells.bound[chosen.cell];
  if (producer < 0) return;
  choose(chosen.chart, producer);
  reveal(chosen.chart, producer);
}

const shown = () => view.to - view.from;
const KEYS = {
  "+": () => zoom(1.4),
  "=": () => zoom(1.4),
  "-": () => zoom(1 / 1.4),
  0: () => setRange(0, WHOLE),
  Home: () => pan(-WHOLE),
  End: () => pan(WHOLE),
  ArrowLeft: () => pan(-0.15 * shown()),
  ArrowRight: () => pan(0.15 * shown()),
  ArrowUp: () => box.scrollBy(0, -PITCH),
  ArrowDown: () => box.scrollBy(0, PITCH),
  PageUp: () => box.scrollBy(0, -view.height),
  PageDown: () => box.scrollBy(0, view.height),
  c: () => toggle("critical"),
  b: () => toggle("classes"),
  m: () => byId("microbatch").focus(),
  w: walkToProducer,
  Escape: clear,
};
const SHIFTED = {
  ArrowLeft: () => walk(-1, 0),
  ArrowRight: () => walk(1, 0),
  ArrowUp: () => walk(0, -1),
  ArrowDown: () => walk(0, 1),
};

// Letters and signs work wherever the page has the focus; keys that scroll a page belong to the drawing when it has it.
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "INPUT") return;
  if (event.target !== canvas && event.key.length > 1 && event.key !== "Escape") return;
  const action = (event.shiftKey && SHIFTED[event.key]) || KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  forgetPointer();
  action();
}

function onWheel(event) {
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 24 : 1;
  const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  const amount = (sideways && event.deltaX ? event.deltaX : event.deltaY) * unit;
  pointer = { x: event.clientX, y: event.clientY };
  if (sideways) {
    pan(amount / scale());
    return showUnderPointer();
  }
  const x = event.clientX - canvas.getBoundingClientRect().left;
  zoom(Math.exp(-amount * 0.0016), timeOf(Math.max(x, GUTTER)));
  showUnderPointer();
}

function onMove(event) {
  if (!drag) {
    const [x, y] = [event.clientX, event.clientY];
    if (pointer?.forgotten && pointer.x === x && pointer.y === y) return; // the drawing moved, the pointer did not
    pointer = { x, y };
    return showUnderPointer();
  }
  drag.moved ||= Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 4;
  if (!drag.moved) return;
  showTip(null);
  canvas.classList.add("dragging");
  const time = (drag.x - event.clientX) / scale();
  setRange(drag.from + time, drag.to + time);
  box.scrollTop = drag.scroll + drag.y - event.clientY;
}

function onDown(event) {
  if (event.button !== 0) return;
  drag = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, scroll: box.scrollTop, moved: false };
  canvas.setPointerCapture(event.pointerId);
}

function onUp(event) {
  const moved = drag?.moved;
  drag = null;
  canvas.classList.remove("dragging");
  if (moved !== false) return;
  const place = under(event);
  if (place && place.cell >= 0) choose(place.number, place.cell);
  else clear();
}

function resize() {
  view.width = box.clientWidth;
  view.height = Math.min(fullHeight, Math.max(160, Math.floor(innerHeight * 0.74) - 2));
  canvas.style.height = `${view.height}px`;
  byId("spacer").style.height = `${fullHeight - view.height}px`;
  redraw();
}

// What is seen and chosen, for tests and for whoever scripts the page.
function expose() {
  const { from, to, scroll } = view;
  const cell = chosen.cell < 0 ? "" : cellName(charts[chosen.chart], chosen.cell);
  Object.assign(canvas.dataset, { from, to, scroll, cell, gutter: GUTTER, right: RIGHT, pitch: PITCH, works: ROWS.works });
  Object.assign(canvas.dataset, { phases: ROWS.phases, cells: ROWS.cells, classes: chosen.classes });
  Object.assign(canvas.dataset, { tops: tops.join(" "), microbatch: chosen.microbatch, critical: chosen.critical });
}

function start() {
  readColours();
  buildHeads();
  buildLegend();
  buildTables();
  canvas.addEventListener("wheel", onWheel, { passive: false });
  canvas.addEventListener("pointerdown", onDown);
  canvas.addEventListener("pointermove", onMove);
  canvas.addEventListener("pointerup", onUp);
  canvas.addEventListener("pointercancel", () => (drag = null));
  canvas.addEventListener("pointerleave", () => {
    pointer = null;
    showTip(null);
  });
  addEventListener("keydown", onKey);
  byId("zoom-in").addEventListener("click", () => zoom(1.4));
  byId("zoom-out").addEventListener("click", () => zoom(1 / 1.4));
  byId("fit").addEventListener("click", () => setRange(0, WHOLE));
  byId("clear").addEventListener("click", clear);
  byId("critical").addEventListener("change", () => toggle("critical"));
  byId("classes").addEventListener("change", () => toggle("classes"));
  byId("microbatch").addEventListener("input", (event) => {
    const text = event.target.value;
    chosen.microbatch = /^\d+$/.test(text) ? Number(text) : -1;
    forgetPointer();
    redraw();
  });
  byId("microbatch").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" && event.key !== "Enter") return;
    if (event.key === "Escape") clear();
    canvas.focus();
  });
  box.addEventListener("scroll", () => {
    view.scroll = box.scrollTop;
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColours();
    buildLegend();
    redraw();
  });
  new ResizeObserver(resize).observe(box);
  addEventListener("resize", resize);
  addEventListener("hashchange", ({ newURL }) => followLink(new URL(newURL).hash)); // `writeLink` may have come between
  resize();
  if (location.hash.length > 1) followLink(location.hash);
}

start();
