// The plot of step time against memory: a point per plan, the front, and the lines of the bound and of the memory.
const points = plans.map((plan) => [plan.memory.needed_bytes / GB, plan.step_s]);
const front = facts.pareto.toSorted((a, b) => a.bytes - b.bytes || b.step_s - a.step_s);
const limits = {
  memory: facts.cluster.usable_bytes ? facts.cluster.usable_bytes / GB : null,
  bound: facts.certificate.bound_s,
};
const plot = { svg: null, x: null, y: null };
let circles = [];
let plotKeys = {};

function buildPlot() {
  const all = [...points, ...front.map((each) => [each.bytes / GB, each.step_s])];
  const { width, height, left, right, top, bottom } = PLOT;
  const across = [...all.map(([gb]) => gb), ...(limits.memory ? [limits.memory] : [])];
  const up = [...all.map(([, step]) => step), ...(limits.bound ? [limits.bound] : [])];
  plot.x = makeAxis(...withRoom(across, 0), left, width - right);
  plot.y = makeAxis(...withRoom(up, 0), height - bottom, top);
  const words = { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-labelledby": "plot-head" };
  plot.svg = draw("svg", words, byId("plot"));
  buildLegend();
  const middle = () => [plot.x.at(points[state.chosen][0]), plot.y.at(points[state.chosen][1])];
  plotKeys = zooming(plot.svg, byId("plot-zoom"), () => plot, middle, showPlot);
}

function buildLegend() {
  const legend = byId("plot-legend");
  const entry = (kind, text) => {
    const line = make("span", "", legend);
    make("i", "", line).className = `mark ${kind}`;
    line.append(text);
  };
  entry("plan", "plan, with its number");
  entry("plan first", "chosen");
  entry("plan second", "beside it");
  if (front.length) entry("on-front", "no plan found is both faster and smaller");
  if (limits.bound) entry("limit", `bound: ${seconds(limits.bound)} s`);
  if (limits.memory) entry("limit upright", `memory of a device: ${limits.memory.toFixed(1)} GB`);
}

// Draws the part of the plot that is seen; a point that has the focus keeps it.
function showPlot() {
  const { svg, x, y } = plot;
  const focused = circles.indexOf(document.activeElement);
  const inside = drawFrame(svg, x, y, ["memory of the fullest rank, GB", "step time, s"]);
  drawLimits(inside, x, y);
  if (front.length) drawFront(inside, front.map((each) => [x.at(each.bytes / GB), y.at(each.step_s)]));
  circles = [];
  points.forEach(([gb, step], number) => drawPlan(inside, number, x.at(gb), y.at(step)));
  drawNumbers(inside, points.map(([gb, step]) => [x.at(gb), y.at(step)]));
  const [gb, step] = points[state.chosen];
  draw("circle", { id: "chosen", r: 6, cx: x.at(gb), cy: y.at(step) }, inside);
  if (focused >= 0) circles[focused].focus();
}

function drawLimits(parent, x, y) {
  const { width, height, left, right, top, bottom } = PLOT;
  if (limits.bound) {
    const at = y.at(limits.bound);
    draw("line", { x1: left, x2: width - right, y1: at, y2: at, class: "limit" }, parent);
  }
  if (limits.memory) {
    const at = x.at(limits.memory);
    draw("line", { x1: at, x2: at, y1: top, y2: height - bottom, class: "limit" }, parent);
  }
}

function drawFront(parent, places) {
  const [[x, y], ...rest] = places;
  draw("path", { d: `M${x} ${y}${rest.map(([px, py]) => `H${px}V${py}`).join("")}`, class: "front" }, parent);
  places.forEach(([cx, cy], number) => {
    const { step_s: step, bytes, file } = front[number];
    const mark = draw("circle", { cx, cy, r: 3, class: "on-front" }, parent);
    const lines = [file || "not among the plans below", `${seconds(step)} s`, `${gigabytes(bytes)} GB`];
    mark.addEventListener("pointermove", (event) => showTip(lines, event.clientX, event.clientY));
    mark.addEventListener("pointerleave", () => showTip(null));
  });
}

function drawPlan(parent, number, cx, cy) {
  const mark = draw("circle", { cx, cy, r: 6, class: "plan", tabindex: 0, role: "button" }, parent);
  mark.classList.toggle("first", number === state.chosen);
  mark.classList.toggle("second", number === state.beside);
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

const BESIDE = [[9, 4], [-9, 4], [0, -10], [0, 18], [8, -7], [8, 15], [-8, -7], [-8, 15]];

// Numbers beside their points where there is room: none covers a point or another number. Zoom makes room.
function drawNumbers(parent, places) {
  const taken = places.map(([x, y]) => [x - 7, y - 7, x + 7, y + 7]);
  places.forEach(([x, y], number) => {
    const width = 7.5 * shortName(number).length;
    for (const [dx, dy] of BESIDE) {
      const left = dx > 0 ? x + dx : dx < 0 ? x + dx - width : x - width / 2;
      const room = [left - 1, y + dy - 11, left + width + 1, y + dy + 2];
      if (taken.some((other) => room[0] < other[2] && other[0] < room[2] && room[1] < other[3] && other[1] < room[3])) continue;
      taken.push(room);
      draw("text", { x: left, y: y + dy, class: "number" }, parent, shortName(number));
      return;
    }
  });
}
