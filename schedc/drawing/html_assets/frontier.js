// The page of the frontier: the plot, the sliders, the table, and the drawing of the chosen schedule.
const KEYS = { F: [0.25, 3, 0.05], I: [0.25, 3, 0.05], W: [0.25, 3, 0.05], p2p: [0, 0.2, 0.005] };
const SIZE = { width: 900, height: 430, left: 52, right: 20, top: 12, bottom: 40 };
const costs = { ...page.costs };
const short = (value) => `${Number(value.toPrecision(4))}`;
let times = [];
let chosen = 0;

const ns = "http://www.w3.org/2000/svg";
function draw(name, attributes, parent, text = "") {
  const element = document.createElementNS(ns, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== "") element.textContent = text;
  parent.append(element);
  return element;
}

const atStart = () => Object.keys(KEYS).every((key) => costs[key] === page.costs[key]);

function buildSliders() {
  for (const [key, [min, max, step]] of Object.entries(KEYS)) {
    const label = make("label", `${key} `, byId("sliders"));
    const slider = make("input", "", label);
    Object.assign(slider, { type: "range", id: `slider-${key}`, min, max, step, value: costs[key] });
    const value = make("output", short(costs[key]), label);
    const back = () => { slider.value = page.costs[key]; move(page.costs[key]); };
    const move = (to) => { costs[key] = to; value.textContent = short(to); show(); };
    slider.addEventListener("input", () => move(Number(slider.value)));
    slider.addEventListener("dblclick", back);
  }
}

// A logarithmic axis: from the pixel `low` to the pixel `high`.
function axis(least, most, low, high) {
  const from = Math.log(least), to = Math.log(most);
  const at = (value) => low + (Math.log(Math.max(value, least)) - from) / (to - from) * (high - low);
  const ticks = [];
  for (let power = -3; power < 5; power++) {
    for (const digit of [1, 2, 5]) {
      const value = digit * 10 ** power;
      if (value >= least * 0.999 && value <= most * 1.001) ticks.push(value);
    }
  }
  return { at, ticks };
}

// Of more points only those of the front have their names in the plot.
const MOST_NAMES = 8;

function showPlot() {
  const { width, height, left, right, top, bottom } = SIZE;
  const lines = atStart() ? page.facts.floors : [];
  const memory = [...points.map((point) => point.memory), ...lines.flatMap((line) => line.memory)];
  const bubble = [...times.map((each) => each.bubble), ...lines.flatMap((line) => line.bubble)].filter((each) => each > 0);
  const x = axis(Math.min(...memory) / 1.1, Math.max(...memory) * 1.3, left, width - right);
  const y = axis(Math.min(...bubble) / 1.3, Math.max(...bubble) * 1.2, height - bottom, top);
  byId("plot").replaceChildren();
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-labelledby": "plot-head" }, byId("plot"));
  for (const tick of x.ticks) {
    draw("line", { x1: x.at(tick), x2: x.at(tick), y1: top, y2: height - bottom, class: "grid" }, svg);
    draw("text", { x: x.at(tick), y: height - bottom + 16, "text-anchor": "middle", class: "tick" }, svg, short(tick));
  }
  for (const tick of y.ticks) {
    draw("line", { x1: left, x2: width - right, y1: y.at(tick), y2: y.at(tick), class: "grid" }, svg);
    draw("text", { x: left - 6, y: y.at(tick) + 4, "text-anchor": "end", class: "tick" }, svg, short(tick));
  }
  draw("text", { x: width - right, y: height - 6, "text-anchor": "end" }, svg, "memory of the fullest rank, microbatches");
  draw("text", { x: 4, y: top + 2 }, svg, "bubble");
  lines.forEach((line, number) => {
    const d = line.memory.map((cap, place) => `${place ? "L" : "M"}${x.at(cap)} ${y.at(line.bubble[place])}`).join("");
    draw("path", { d, class: `floor line${number}` }, svg);
    draw("text", { x: x.at(line.memory[0]) + 4, y: y.at(line.bubble[0]) - 5, class: `name line${number}` }, svg,
      `floor, v = ${line.per_rank}`);
  });
  const names = [];
  // Above a point, or below it where another name stands; a letter has some 8 px.
  const placed = ({ cx, cy }, name) => {
    const x = cx + 8, end = x + 8 * name.length;
    const free = (y) => names.every((other) => Math.abs(other.y - y) > 14 || other.x > end || x > other.end);
    const y = free(cy - 6) ? cy - 6 : cy + 16;
    names.push({ x, y, end });
    return { x, y };
  };
  points.forEach((point, number) => {
    const kind = `point${point.found ? " found" : ""}${point.on_front ? " front" : ""}${number === chosen ? " chosen" : ""}`;
    const where = { cx: x.at(point.memory), cy: y.at(times[number].bubble), r: number === chosen ? 7 : 5 };
    const mark = draw("circle", { ...where, class: kind, tabindex: 0, "aria-label": nameOf(point) }, svg);
    const tip = [nameOf(point), `bubble ${short(times[number].bubble)}`, `memory ${short(point.memory)}`];
    mark.addEventListener("pointermove", (event) => showTip(tip, event.clientX, event.clientY));
    mark.addEventListener("pointerleave", () => showTip(null));
    mark.addEventListener("click", () => choose(number));
    mark.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(number); });
    if (point.on_front || points.length <= MOST_NAMES) draw("text", { ...placed(where, nameOf(point)), class: "name" }, svg, nameOf(point));
  });
}

const nameOf = (point) => {
  if (point.found) {
    const proved = point.proven && atStart() ? ", proved the least of its v, memory and costs" : "";
    return `${point.kept ? "kept" : "found"}, v = ${point.per_rank}${proved}`;
  }
  const own = Object.entries(point.sizes).filter(([key]) => key !== "P" && key !== "M");
  return point.schedule + own.map(([key, value]) => ` ${key} = ${value}`).join("");
};

// The command whose figures are v times those of the point, under the costs of the sliders.
function commandOf(point) {
  if (point.found && !point.kept) return point.command;
  const sizes = Object.entries(point.sizes).map(([key, value]) => ` -D ${key}=${value}`).join("");
  const given = { F: costs.F, I: costs.I, W: costs.W, p2p: Number((costs.p2p * point.per_rank).toPrecision(12)) };
  const plain = { F: 1, I: 1, W: 1, p2p: 0 };
  const options = Object.keys(given).filter((key) => given[key] !== plain[key]).map((key) => ` --cost ${key}=${given[key]}`);
  return `schedc check ${point.kept || point.schedule + sizes}${options.join("")}`;
}

function showTable() {
  const table = byId("points");
  table.replaceChildren();
  const head = make("tr", "", make("thead", "", table));
  for (const title of ["schedule", "v", "copies", "memory", "bubble", "command"]) make("th", title, head);
  const body = make("tbody", "", table);
  const sorted = points.map((_, number) => number);
  sorted.sort((a, b) => points[a].memory - points[b].memory || times[a].bubble - times[b].bubble);
  for (const number of sorted) {
    const point = points[number], row = make("tr", "", body);
    if (number === chosen) row.className = "chosen";
    const cells = [nameOf(point), point.per_rank, point.copies, short(point.memory), short(times[number].bubble)];
    for (const cell of cells) make("td", `${cell}`, row);
    make("code", commandOf(point), make("td", "", row));
    row.addEventListener("click", () => choose(number));
  }
}

function showChosen() {
  const point = points[chosen], { start, end, makespan } = times[chosen];
  byId("chosen-head").textContent = nameOf(point);
  byId("command").textContent = commandOf(point);
  byId("chosen-said").textContent = point.found && !point.kept
    ? "The command searches this cell again. Its order may be another one. Its figures are v times those here."
    : page.chosen.includes(point.schedule) && !atStart()
    ? "This schedule chooses its order by costs. The page keeps the order of the first costs, and the command chooses anew."
    : `The figures of the command are ${point.per_rank} times those here.`;
  byId("text").textContent = page.texts[point.kept || point.schedule];
  const { starts, words: ops } = orders[chosen], canvas = byId("drawing"), height = 16;
  const scale = devicePixelRatio || 1, width = canvas.parentElement.clientWidth;
  Object.assign(canvas, { width: width * scale, height: (starts.length - 1) * height * scale });
  canvas.style.height = `${(starts.length - 1) * height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const look = getComputedStyle(document.documentElement);
  const colours = ["--op-f", "--op-i", "--op-w"].map((name) => look.getPropertyValue(name));
  for (let rank = 0; rank + 1 < starts.length; rank++) {
    for (let row = starts[rank]; row < starts[rank + 1]; row++) {
      const turn = ops[row] & 3, paired = ops[row] >> 24 & 1 || (row + 1 < starts[rank + 1] && ops[row + 1] >> 24 & 1);
      const upper = paired && !(ops[row] >> 24 & 1), tall = paired ? height / 2 - 0.5 : height - 1;
      const left = start[row] / makespan * width, wide = (end[row] - start[row]) / makespan * width;
      const top = rank * height + (paired && !upper ? height / 2 - 0.5 : 0);
      pen.fillStyle = colours[turn === 3 ? 1 : turn];
      pen.fillRect(left, top, Math.max(0.4, wide - 0.5), tall);
      if (turn === 3) {
        pen.fillStyle = colours[2];
        pen.fillRect(left + wide / 2, top, Math.max(0.2, wide / 2 - 0.5), tall);
      }
    }
  }
}

function choose(number) {
  chosen = number;
  show(false);
}

function show(anew = true) {
  if (anew) times = points.map((_, number) => priced(number, costs));
  byId("floors-said").textContent = !page.facts.floors.length ? "" : atStart()
    ? "A line is the least bubble of any order with a split backward on one copy of the weights, with v stages per rank."
    : "Orders and memory are fixed, and times are those of the sliders. The floors are of the first costs, and are hidden.";
  showPlot();
  showTable();
  showChosen();
}

function entry(kind, text) {
  const line = make("span", "", byId("plot-legend"));
  make("i", "", line).className = `mark ${kind}`;
  line.append(text);
}

byId("title").textContent = page.title;
byId("said").textContent = "A microbatch takes F, I and W on a rank, and a chunk of a schedule with v stages per rank a v-th "
  + "of them. A message takes p2p. A double click takes a slider back.";
const cells = page.facts.not_searched.map((cell) => `v = ${cell.per_rank} at ${short(cell.memory)}`).join(", ");
const missing = page.facts.floors_missing.join(", ");
byId("not-searched").textContent = [
  cells && `No order was searched at these numbers of stages per rank and memory: ${cells}. `
    + "schedc frontier --time searches some cells, and schedc tune any.",
  missing && `There is no floor for v = ${missing}.`,
].filter(Boolean).join(" ");
entry("front", "no schedule here has less of one and no more of the other");
entry("plain", "other schedules");
entry("chosen", "the one whose order is drawn below");
if (points.some((point) => point.found)) entry("found", "order that a search found, here or for the library");
buildSliders();
show();
const wrong = points.findIndex((point, number) => Math.abs(point.bubble - times[number].bubble) > 1e-6 * times[number].makespan);
if (wrong >= 0) throw new Error(`the page prices ${nameOf(points[wrong])} at ${times[wrong].bubble}, not ${points[wrong].bubble}`);
chosen = Math.max(0, points.findIndex((point) => point.on_front));
show(false);
addEventListener("resize", showChosen);
