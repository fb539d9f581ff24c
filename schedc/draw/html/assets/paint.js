// The drawing: only lanes and cells in view, and never more pieces than there are pixels.
const canvas = document.getElementById("canvas");
const context = canvas.getContext("2d");
const FONT = '"DejaVu Sans", Verdana, Helvetica, Arial, sans-serif';
const colours = {};
const hatches = {};

const cssName = (name) => `--${name}`;

// The colours of the style sheet, light or dark, and the hatched patterns of idle time.
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["paper", "text", "muted", "grid", "rule", "curve", "curve-fill", "mark", "edge"];
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
  });
  context.restore();
  charts.forEach((chart, number) => eachLane(chart, number, (rank, y) => paintGutter(chart, rank, y)));
  charts.forEach(paintTitle);
  paintAxis(step);
  expose();
}

function eachLane(chart, number, draw) {
  const first = Math.max(0, Math.floor((ROWS.axis - laneTop(number, 0)) / PITCH));
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
  context.fillText("time", 10, ROWS.axis / 2);
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
  context.fillRect(0, y - 1, GUTTER, PITCH);
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.font = `600 12px ${FONT}`;
  context.fillStyle = colours.text;
  context.fillText(`rank ${rank}`, 10, y + ROWS.phases + ROWS.cells / 2, GUTTER - 16);
  context.font = `10.5px ${FONT}`;
  context.fillStyle = colours.curve;
  const held = y + ROWS.phases + ROWS.cells + ROWS.memory / 2;
  context.fillText(`peak ${shortNumber(chart.peaks[rank])}`, 10, held, GUTTER - 16);
}

function paintEnd(chart, number) {
  const x = Math.round(xOf(chart.makespan));
  const top = laneTop(number, 0);
  context.fillStyle = colours.muted;
  context.fillRect(x, top - 4, 1, chart.ranks * PITCH - ROWS.gap + 6);
}

function paintLane(chart, rank, y) {
  const { start, end } = chart.cells;
  const high = chart.rankStart[rank + 1];
  const from = firstWhere(chart.rankStart[rank], high, (cell) => end[cell] >= view.from);
  const to = firstWhere(from, high, (cell) => start[cell] > view.to);
  paintPhases(chart, from, to, y);
  paintGaps(chart, rank, y + ROWS.phases);
  paintCells(chart, from, to, y + ROWS.phases);
  paintMemory(chart, rank, from, to, y + ROWS.phases + ROWS.cells);
}

// x of a time, kept near what is seen: a canvas is exact only for moderate numbers.
const nearX = (time) => Math.min(Math.max(xOf(time), GUTTER - 4), view.width + 4);

function paintPhases(chart, from, to, y) {
  const { start, end, phase } = chart.cells;
  if (chart.phases.length < 2) return;
  for (let cell = from; cell < to; ) {
    const number = phase[cell];
    const x = nearX(start[cell]);
    let last = cell;
    while (last + 1 < to && phase[last + 1] === number) last++;
    context.fillStyle = page.phaseTints[number % page.phaseTints.length];
    context.fillRect(x, y, Math.max(nearX(end[last]) - x, 0.5), ROWS.phases - 1);
    cell = last + 1;
  }
}

// Idle time; in each wait the classes stand in their order, imbalance and messages last, before the cell.
function paintGaps(chart, rank, y) {
  const { start, end } = chart.gaps;
  const high = chart.gapStart[rank + 1];
  let gap = firstWhere(chart.gapStart[rank], high, (g) => end[g] >= view.from);
  for (; gap < high && start[gap] <= view.to; gap++) {
    let time = start[gap];
    const pieces = chosen.classes ? page.classes.map((name, i) => [name, chart.parts[i][gap]]) : [];
    for (const [name, part] of chosen.classes ? pieces : [["idle", end[gap] - start[gap]]]) {
      if (part <= 0) continue;
      const x = nearX(time);
      time += part;
      context.fillStyle = hatches[name];
      if (nearX(time) - x > 0.3) context.fillRect(x, y, nearX(time) - x, ROWS.cells);
    }
  }
}

function paintCells(chart, from, to, y) {
  if (to > from && (to - from) * 2 > plotWidth()) return paintBlend(chart, from, to, y);
  const { start, end, middle, kind2 } = chart.cells;
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let cell = from; cell < to; cell++) {
    const [left, right] = [nearX(start[cell]), nearX(end[cell])];
    const ops = opsOf(chart, cell);
    const paired = chart.paired && kind2[cell] >= 0;
    const seam = paired ? nearX(middle[cell]) : right;
    paintOp(chart, ops[0], left, seam, y);
    if (!paired) continue;
    paintOp(chart, ops[1], seam, right, y);
    paintPairEdge(left, right, y, ops);
  }
  context.globalAlpha = 1;
}

// Cells thinner than pixels: every column shows the mean of its cells' colours, as dense as it is covered.
function paintBlend(chart, from, to, y) {
  const { start, end, middle, kind2 } = chart.cells;
  const sums = new Float64Array(4 * (Math.ceil(plotWidth() + RIGHT) + 1));
  const add = (op, low, high) => {
    const [red, green, blue] = rgbOf(page.fills[op.kind][chunkOf(chart, op.stage, op.microbatch) % 2]);
    for (let column = Math.floor(low); column < high && column * 4 < sums.length; column++) {
      const part = Math.min(high, column + 1) - Math.max(low, column);
      if (column < 0 || part <= 0) continue;
      sums[4 * column] += red * part;
      sums[4 * column + 1] += green * part;
      sums[4 * column + 2] += blue * part;
      sums[4 * column + 3] += part;
    }
  };
  const marked = [];
  for (let cell = from; cell < to; cell++) {
    const [left, right] = [nearX(start[cell]) - GUTTER, nearX(end[cell]) - GUTTER];
    const ops = opsOf(chart, cell);
    const seam = ops.length > 1 ? nearX(middle[cell]) - GUTTER : right;
    add(ops[0], left, seam);
    if (ops.length > 1) add(ops[1], seam, right);
    if (chosen.microbatch >= 0 && holds(chart, cell, chosen.microbatch)) marked.push(cell);
  }
  const strength = chosen.microbatch < 0 ? 1 : 0.22;
  for (let column = 0; column * 4 < sums.length; column++) {
    const covered = sums[4 * column + 3];
    if (covered < 0.004) continue;
    const mean = [0, 1, 2].map((i) => Math.round(sums[4 * column + i] / covered));
    context.fillStyle = `rgb(${mean.join()})`;
    context.globalAlpha = strength * Math.min(covered, 1);
    context.fillRect(GUTTER + column, y, 1, ROWS.cells);
  }
  for (const cell of marked) {
    for (const op of opsOf(chart, cell)) {
      const isSecond = op.kind === kind2?.[cell];
      if (op.microbatch === chosen.microbatch) {
        paintOp(chart, op, nearX(isSecond ? middle[cell] : start[cell]), nearX(end[cell]), y);
      }
    }
  }
  context.globalAlpha = 1;
}

const known = new Map();
function rgbOf(colour) {
  if (!known.has(colour)) known.set(colour, [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16)));
  return known.get(colour);
}

function paintOp(chart, op, left, right, y) {
  const chunk = chunkOf(chart, op.stage, op.microbatch);
  const width = right - left;
  const isChosen = chosen.microbatch === op.microbatch;
  context.globalAlpha = chosen.microbatch < 0 || isChosen ? 1 : 0.22;
  context.fillStyle = page.fills[op.kind][chunk % 2];
  const drawn = width >= 4 ? width - 1 : isChosen ? Math.max(width, 1.5) : width;
  context.fillRect(left, y, drawn, ROWS.cells);
  const text = String(op.microbatch);
  if (width < 7 * text.length + 3) return;
  context.fillStyle = page.inks[chunk % page.inks.length];
  context.fillText(text, (left + right) / 2 - 0.5, y + ROWS.cells / 2 + 0.5);
}

function paintPairEdge(left, right, y, ops) {
  if (right - left < 6) return;
  const isChosen = chosen.microbatch < 0 || ops.some((op) => op.microbatch === chosen.microbatch);
  context.globalAlpha = isChosen ? 1 : 0.22;
  context.strokeStyle = colours.edge;
  context.lineWidth = 1.2;
  context.strokeRect(left + 0.6, y + 0.6, right - left - 2.2, ROWS.cells - 1.2);
}

// What the rank holds: the most in each pixel, so that no peak is lost.
function paintMemory(chart, rank, from, to, y) {
  const { start, end, held, after } = chart.cells;
  const columns = new Float64Array(Math.max(0, Math.ceil(nearX(chart.makespan) - GUTTER)));
  const raise = (low, high, value) => {
    const last = Math.min(Math.floor(nearX(high) - GUTTER), columns.length - 1);
    for (let i = Math.max(0, Math.floor(nearX(low) - GUTTER)); i <= last; i++) {
      if (columns[i] < value) columns[i] = value;
    }
  };
  const low = chart.rankStart[rank];
  for (let cell = Math.max(low, from - 1); cell < to; cell++) {
    raise(start[cell], end[cell], held[cell]);
    raise(end[cell], cell + 1 < chart.rankStart[rank + 1] ? start[cell + 1] : chart.makespan, after[cell]);
  }
  const unit = chart.highest > 0 ? (ROWS.memory - 3) / chart.highest : 0;
  const base = y + ROWS.memory;
  context.beginPath();
  context.moveTo(GUTTER, base);
  for (let i = 0; i < columns.length; i++) {
    const top = base - columns[i] * unit;
    context.lineTo(GUTTER + i, top);
    context.lineTo(GUTTER + i + 1, top);
  }
  context.lineTo(GUTTER + columns.length, base);
  context.fillStyle = colours["curve-fill"];
  context.fill();
  context.strokeStyle = colours.curve;
  context.lineWidth = 1;
  context.stroke();
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

// The chosen cell, and a line from the end of what it waited for.
function paintChosen(chart, number) {
  const { start, end, bound } = chart.cells;
  const place = (cell) => laneTop(number, rankOf(chart, cell)) + ROWS.phases;
  const outline = (cell, colour) => {
    context.strokeStyle = colour;
    const width = Math.max(nearX(end[cell]) - nearX(start[cell]), 2);
    context.strokeRect(nearX(start[cell]) - 1, place(cell) - 1, width + 1, ROWS.cells + 2);
  };
  context.lineWidth = 2.5;
  outline(chosen.cell, colours.text);
  const producer = bound[chosen.cell];
  if (producer < 0) return;
  context.setLineDash([5, 3]);
  outline(producer, colours.text);
  context.beginPath();
  context.moveTo(nearX(end[producer]), place(producer) + ROWS.cells / 2);
  context.lineTo(nearX(start[chosen.cell]), place(chosen.cell) + ROWS.cells / 2);
  context.stroke();
  context.setLineDash([]);
}
