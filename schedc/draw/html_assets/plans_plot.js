// The plot of step time against memory: a point per plan, the front, and the lines of the bound and of the memory.
const PLOT = { width: 620, height: 400, left: 58, right: 16, top: 20, bottom: 44 };
const SPACE = "http://www.w3.org/2000/svg";
const circles = [];

function draw(name, attributes, parent, text = "") {
  const element = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  parent.append(element);
  return element;
}

// An axis around values: its place of a value, and round values along it.
function axisOf(values, from, to) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = 0.08 * (high - low) || 0.08 * Math.abs(high) || 1;
  const [first, last] = [Math.max(0, low - room), high + room];
  const at = (value) => from + ((value - first) / (last - first)) * (to - from);
  const least = (60 * (last - first)) / Math.abs(to - from);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((m) => m * power).find((each) => each >= least * (1 - 1e-12));
  const ticks = [];
  for (let i = Math.ceil(first / step); i * step <= last; i++) ticks.push(i * step);
  return { at, ticks };
}

function buildPlot() {
  const { width, height, left, right, top, bottom } = PLOT;
  const memory = facts.cluster.usable_bytes ? [facts.cluster.usable_bytes / GB] : [];
  const bound = facts.certificate.bound_s;
  const points = [...plans.map((plan) => [plan.memory.needed_bytes / GB, plan.step_s])];
  const front = facts.pareto.map((each) => [each.bytes / GB, each.step_s]).sort((a, b) => a[0] - b[0] || b[1] - a[1]);
  const all = [...points, ...front];
  if (!all.length) return;
  const x = axisOf([...all.map(([gb]) => gb), ...memory], left, width - right);
  const y = axisOf([...all.map(([, step]) => step), ...(bound ? [bound] : [])], height - bottom, top);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-labelledby": "plot-head" }, byId("plot"));
  drawAxes(svg, x, y);
  drawLimits(svg, x, y, memory[0], bound);
  if (front.length) drawFront(svg, front.map(([gb, step]) => [x.at(gb), y.at(step)]));
  points.forEach(([gb, step], number) => drawPlan(svg, number, x.at(gb), y.at(step)));
  draw("circle", { id: "chosen", r: 6 }, svg);
}

function drawAxes(svg, x, y) {
  const { width, height, left, right, top, bottom } = PLOT;
  for (const value of x.ticks) {
    const at = x.at(value);
    draw("line", { x1: at, x2: at, y1: top, y2: height - bottom, class: "grid" }, svg);
    draw("text", { x: at, y: height - bottom + 16, class: "tick", "text-anchor": "middle" }, svg, shortest(value));
  }
  for (const value of y.ticks) {
    const at = y.at(value);
    draw("line", { x1: left, x2: width - right, y1: at, y2: at, class: "grid" }, svg);
    draw("text", { x: left - 6, y: at + 4, class: "tick", "text-anchor": "end" }, svg, shortest(value));
  }
  const middle = (left + width - right) / 2;
  draw("text", { x: middle, y: height - 8, class: "tick", "text-anchor": "middle" }, svg, "GB of the fullest rank");
  draw("text", { x: 4, y: 12, class: "tick" }, svg, "step, s");
}

const shortest = (value) => String(Number(value.toPrecision(6)));

function drawLimits(svg, x, y, memory, bound) {
  const { width, height, left, right, top, bottom } = PLOT;
  if (bound) {
    const at = y.at(bound);
    draw("line", { x1: left, x2: width - right, y1: at, y2: at, class: "limit" }, svg);
    draw("text", { x: left + 6, y: at + 15 }, svg, `bound: ${seconds(bound)} s`);
  }
  if (memory) {
    const at = x.at(memory);
    draw("line", { x1: at, x2: at, y1: top, y2: height - bottom, class: "limit" }, svg);
    draw("text", { x: at - 5, y: top + 14, "text-anchor": "end" }, svg, `a device has ${memory.toFixed(1)} GB`);
  }
}

function drawFront(svg, places) {
  const [[x, y], ...rest] = places;
  draw("path", { d: `M${x} ${y}${rest.map(([px, py]) => `H${px}V${py}`).join("")}`, class: "front" }, svg);
  places.forEach(([cx, cy], number) => {
    const { step_s: step, bytes, file } = facts.pareto.toSorted((a, b) => a.bytes - b.bytes || b.step_s - a.step_s)[number];
    const mark = draw("circle", { cx, cy, r: 3, class: "on-front" }, svg);
    const lines = [file || "not among the plans below", `${seconds(step)} s`, `${gigabytes(bytes)} GB`];
    mark.addEventListener("pointermove", (event) => showTip(lines, event.clientX, event.clientY));
    mark.addEventListener("pointerleave", () => showTip(null));
  });
}

function drawPlan(svg, number, cx, cy) {
  const mark = draw("circle", { cx, cy, r: 6, class: "plan", tabindex: 0, role: "button" }, svg);
  mark.setAttribute("aria-label", describePlan(number).join(", "));
  mark.addEventListener("click", (event) => (event.shiftKey ? putBeside(number) : choose(number)));
  mark.addEventListener("pointermove", (event) => showTip(describePlan(number), event.clientX, event.clientY));
  mark.addEventListener("pointerleave", () => showTip(null));
  mark.addEventListener("focus", () => {
    const { right, top } = mark.getBoundingClientRect();
    if (mark.matches(":focus-visible")) showTip(describePlan(number), right, top);
  });
  mark.addEventListener("blur", () => showTip(null));
  mark.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    choose(number);
  });
  circles.push(mark);
}

// The chosen plan is drawn once more above the others, which may lie on its point.
function showPlot() {
  circles.forEach((mark, number) => mark.classList.toggle("first", number === state.chosen));
  circles.forEach((mark, number) => mark.classList.toggle("second", number === state.beside));
  for (const name of ["cx", "cy"]) byId("chosen").setAttribute(name, circles[state.chosen].getAttribute(name));
}
