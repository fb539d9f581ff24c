// The drawing around the lanes: colours, axis, titles, gutter, critical path and what is chosen.
const canvas = document.getElementById("canvas");
const context = canvas.getContext("2d");
const FONT = '"DejaVu Sans", Verdana, Helvetica, Arial, sans-serif';
const colours = {};
const hatches = {};

const cssName = (name) => `--${name}`;

// The colours of the style sheet, light or dark, and the hatched patterns of idle time.
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["paper", "text", "muted", "grid", "rule", "curve", "curve-fill", "mark", "edge", "phase-strength"];
  for (const name of names) colours[name] = style.getPropertyValue(cssName(name)).trim();
  const pairs = [["idle", "idle", "hatch"], ...page.classes.map((name) => [name, name, `${name}-hatch`])];
  for (const [name, ground, lines] of pairs) {
    const ink = style.getPropertyValue(cssName(lines)).trim();
    hatches[name] = hatch(style.getPropertyValue(cssName(ground)).trim(), ink, name === "cooldown");
  }
}

function hatch(ground, ink, mirrored) {
  const size = 8;
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.fillStyle = ground;
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = ink;
  pen.lineWidth = 1;
  for (const shift of [-size, 0, size]) {
    pen.moveTo(mirrored ? shift : shift + size, 0);
    pen.lineTo(mirrored ? shift + size : shift, size);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

function paint() {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(view.width * ratio);
  canvas.height = Math.round(view.height * ratio);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, view.width, view.height);
  const step = tickStep();
  paintGrid(step);
  context.save();
  context.beginPath();
  context.rect(GUTTER, ROWS.axis, view.width - GUTTER, view.height - ROWS.axis);
  context.clip();
  charts.forEach((chart, number) => {
    eachLane(chart, number, (rank, y) => paintLane(chart, rank, y));
    paintEnd(chart, number);
    if (chosen.critical) paintCritical(chart, number);
    if (chosen.chart === number && chosen.cell >= 0) paintChosen(chart, number);
    if (chosen.chart === chart.twin && chosen.cell >= 0) outline(chart, number, chosen.cell);
  });
  context.restore();
  charts.forEach((chart, number) => eachLane(chart, number, (rank, y) => paintGutter(chart, rank, y)));
  charts.forEach(paintTitle);
  paintAxis(step);
  expose();
}

function eachLane(chart, number, draw) {
  const first = firstWhere(0, chart.ranks, (rank) => laneTop(number, rank + 1) > ROWS.axis);
  for (let rank = first; rank < chart.ranks; rank++) {
    const y = laneTop(number, rank);
    if (y > view.height) return;
    draw(rank, y);
  }
}

// The smallest of 1, 2, 5 times a power of ten whose ticks stand 64 px apart.
function tickStep() {
  const least = 64 / scale();
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= least * (1 - 1e-12));
}

function* ticks(step) {
  for (let i = Math.ceil(view.from / step - 1e-9); i * step <= view.to + step * 1e-9; i++) yield i * step;
}

function paintGrid(step) {
  context.fillStyle = colours.grid;
  for (const time of ticks(step)) context.fillRect(Math.round(xOf(time)), ROWS.axis, 1, view.height);
}

function paintAxis(step) {
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, view.width, ROWS.axis);
  context.fillStyle = colours.rule;
  context.fillRect(0, ROWS.axis - 1, view.width, 1);
  context.fillStyle = colours.muted;
  context.font = `11px ${FONT}`;
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (const time of ticks(step)) {
    const text = shortNumber(time);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(Math.max(xOf(time), GUTTER + half), view.width - half - 3), ROWS.axis / 2);
  }
  context.textAlign = "left";
  context.fillText(page.timeUnit ? `time in ${page.timeUnit}` : "time", 10, ROWS.axis / 2);
}

function paintTitle(chart, number) {
  const y = tops[number] - view.scroll;
  if (charts.length < 2 || y < ROWS.axis) return;
  context.fillStyle = colours.text;
  context.font = `600 12px ${FONT}`;
  context.textBaseline = "middle";
  context.textAlign = "left";
  const makespan = `makespan ${shortNumber(chart.makespan)}`;
  context.fillText(`${chart.title}   ${makespan}`, 10, y - ROWS.title / 2 - 1, view.width - 20);
}

function paintGutter(chart, rank, y) {
  context.fillStyle = colours.paper;
  const strips = stripsOf(chart, rank).length * ROWS.works;
  context.fillRect(0, y - 1, GUTTER, PITCH + strips);
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.font = `600 12px ${FONT}`;
  context.fillStyle = colours.text;
  context.fillText(`rank ${rank}`, 10, y + ROWS.phases + ROWS.cells / 2, GUTTER - 16);
  context.font = `10.5px ${FONT}`;
  context.fillStyle = colours.curve;
  const held = y + ROWS.phases + ROWS.cells + strips + ROWS.memory / 2;
  context.fillText(`peak ${shortNumber(chart.peaks[rank])}`, 10, held, GUTTER - 16);
  paintLaneNames(chart, rank, y + ROWS.phases + ROWS.cells);
}

function paintEnd(chart, number) {
  const x = Math.round(xOf(chart.makespan));
  const top = laneTop(number, 0);
  context.fillStyle = colours.muted;
  context.fillRect(x, top - 4, 1, rankTop(chart, chart.ranks) - ROWS.gap + 6);
}

function paintCritical(chart, number) {
  const { start, end } = chart.cells;
  context.strokeStyle = context.fillStyle = colours.mark;
  context.lineWidth = 2;
  context.beginPath();
  let before = null;
  for (const cell of chart.critical) {
    const y = laneTop(number, rankOf(chart, cell)) + ROWS.phases;
    const left = nearX(start[cell]);
    const right = nearX(end[cell]);
    const seen = end[cell] >= view.from && start[cell] <= view.to;
    if (before && before.y !== y && (seen || before.seen)) {
      context.moveTo(before.right, before.y + ROWS.cells / 2);
      context.lineTo(left, y + ROWS.cells / 2);
    }
    if (seen && right - left > 5) context.rect(left, y, right - left - 1, ROWS.cells);
    else if (seen) context.fillRect(left, y, Math.max(right - left, 1), 3);
    before = { y, right, seen };
  }
  context.stroke();
}

const middleOf = (chart, number, cell) => laneTop(number, rankOf(chart, cell)) + ROWS.phases + ROWS.cells / 2;

function outline(chart, number, cell) {
  const { start, end } = chart.cells;
  context.strokeStyle = colours.text;
  context.lineWidth = 2.5;
  const [left, right] = [nearX(start[cell]), nearX(end[cell])];
  const top = middleOf(chart, number, cell) - ROWS.cells / 2;
  context.strokeRect(left - 1, top - 1, Math.max(right - left, 2) + 1, ROWS.cells + 2);
}

// The chosen cell, and a line from the end of what it waited for.
function paintChosen(chart, number) {
  const { start, end, bound } = chart.cells;
  outline(chart, number, chosen.cell);
  const producer = bound[chosen.cell];
  if (producer < 0) return;
  context.setLineDash([5, 3]);
  outline(chart, number, producer);
  context.beginPath();
  context.moveTo(nearX(end[producer]), middleOf(chart, number, producer));
  context.lineTo(nearX(start[chosen.cell]), middleOf(chart, number, chosen.cell));
  context.stroke();
  context.setLineDash([]);
}
