// What part of time is seen, which lanes, and what is chosen; every change asks for one redraw.
const WHOLE = page.longest > 0 ? page.longest : 1;
const MANY_LANES = 10;
const lanes = charts.reduce((sum, chart) => sum + chart.ranks, 0);
const inPhases = charts.some((chart) => chart.phases.length > 1);
const ROWS = lanes > MANY_LANES
  ? { axis: 26, title: 22, phases: inPhases ? 12 : 2, cells: 17, works: 9, memory: 13, gap: 6, between: 10 }
  : { axis: 26, title: 24, phases: inPhases ? 14 : 2, cells: 22, works: 11, memory: 20, gap: 11, between: 14 };
const PITCH = ROWS.phases + ROWS.cells + ROWS.memory + ROWS.gap;
const GUTTER = 104;
const RIGHT = 14;

const view = { from: 0, to: WHOLE, width: 0, height: 0, scroll: 0 };
const chosen = { chart: -1, cell: -1, microbatch: -1, critical: false, classes: true };

// Where a rank's lane begins, from the top of its chart; strips of works make the lanes of their ranks higher.
function rankTop(chart, rank) {
  return rank * PITCH + chart.above[rank] * ROWS.works;
}

// Where each chart's first lane begins, from the top of the whole drawing.
const tops = [];
let fullHeight = ROWS.axis;
for (const chart of charts) {
  fullHeight += charts.length > 1 ? ROWS.title : 6;
  tops.push(fullHeight);
  fullHeight += rankTop(chart, chart.ranks) + ROWS.between;
}

const plotWidth = () => Math.max(1, view.width - GUTTER - RIGHT);
const scale = () => plotWidth() / (view.to - view.from);
const xOf = (time) => GUTTER + (time - view.from) * scale();
const timeOf = (x) => view.from + (x - GUTTER) / scale();
const lastTime = () => timeOf(view.width); // the drawing goes on into the right margin
const laneTop = (number, rank) => tops[number] + rankTop(charts[number], rank) - view.scroll;

// The chart and the rank at a height of the canvas, whether the lane's phases are there, and the strip of works that is
// there, else -1; null between lanes.
function laneAt(y) {
  for (let number = charts.length - 1; number >= 0; number--) {
    const inside = y + view.scroll - tops[number];
    if (inside < 0) continue;
    const chart = charts[number];
    const rank = firstWhere(0, chart.ranks, (r) => rankTop(chart, r + 1) > inside);
    if (rank === chart.ranks || rankTop(chart, rank + 1) - inside <= ROWS.gap) return null;
    const below = inside - rankTop(chart, rank);
    const strip = Math.floor((below - ROWS.phases - ROWS.cells) / ROWS.works);
    const onStrip = strip >= 0 && strip < stripsOf(chart, rank).length ? strip : -1;
    return { number, rank, onPhases: inPhases && below < ROWS.phases, onStrip };
  }
  return null;
}

function setRange(from, to) {
  const length = Math.min(Math.max(to - from, WHOLE * 1e-6), WHOLE);
  view.from = Math.min(Math.max(from, 0), WHOLE - length);
  view.to = view.from + length;
  redraw();
}

function zoom(factor, around = (view.from + view.to) / 2) {
  setRange(around - (around - view.from) / factor, around + (view.to - around) / factor);
}

const pan = (time) => setRange(view.from + time, view.to + time);

function reveal(number, cell) {
  const { start, end } = charts[number].cells;
  const length = view.to - view.from;
  if (start[cell] < view.from || end[cell] > view.to) {
    const middle = (start[cell] + end[cell]) / 2;
    setRange(middle - length / 2, middle + length / 2);
  }
  const top = laneTop(number, rankOf(charts[number], cell));
  const box = document.getElementById("chart");
  if (top < ROWS.axis) box.scrollTop += top - ROWS.axis - 8;
  if (top + PITCH > view.height) box.scrollTop += top + PITCH - view.height;
}

let pending = false;
function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    paint();
    linkSoon();
  });
}
