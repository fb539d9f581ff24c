// One lane: phases, idle time, cells and memory; only what is in view, and never more pieces than there are pixels.
function paintLane(chart, rank, y) {
  const { start, end } = chart.cells;
  const high = chart.rankStart[rank + 1];
  const from = firstWhere(chart.rankStart[rank], high, (cell) => end[cell] >= view.from);
  const to = firstWhere(from, high, (cell) => start[cell] > lastTime());
  paintPhases(chart, from, to, y);
  paintGaps(chart, rank, y + ROWS.phases);
  paintCells(chart, from, to, y + ROWS.phases);
  const below = y + ROWS.phases + ROWS.cells;
  paintStrips(chart, rank, below);
  paintMemory(chart, rank, from, to, below + stripsOf(chart, rank).length * ROWS.works);
}

// x of a time, kept near what is seen: a canvas is exact only for moderate numbers.
const nearX = (time) => Math.min(Math.max(xOf(time), GUTTER - 4), view.width + 4);

function paintPhases(chart, from, to, y) {
  const { start, end, phase } = chart.cells;
  if (chart.phases.length < 2) return;
  context.font = PHASE_FONT;
  context.textAlign = "left";
  context.textBaseline = "middle";
  for (let cell = from; cell < to; ) {
    const number = phase[cell];
    const x = nearX(start[cell]);
    let last = cell;
    while (last + 1 < to && phase[last + 1] === number) last++;
    const width = nearX(end[last]) - x;
    context.globalAlpha = Number(colours["phase-strength"]);
    context.fillStyle = page.phaseTints[number % page.phaseTints.length];
    context.fillRect(x, y, Math.max(width - 1, 0.5), ROWS.phases - 1);
    context.globalAlpha = 1;
    const left = Math.max(x, GUTTER) + 4; // stays in view
    if (x + width - left > 10 && x + width - left > phaseWidth(chart.phases[number])) {
      context.fillStyle = colours.text;
      context.fillText(chart.phases[number], left, y + ROWS.phases / 2);
    }
    cell = last + 1;
  }
}

const PHASE_FONT = `${Math.min(ROWS.phases - 2.5, 10)}px ${FONT}`;
const phaseWidths = new Map();

// Room that the name of a phase needs; the font is set.
function phaseWidth(name) {
  if (!phaseWidths.has(name)) phaseWidths.set(name, context.measureText(name).width + 5);
  return phaseWidths.get(name);
}

// Idle time; in each wait the classes stand in their order, imbalance and messages last, before the cell; times at
// JOINs stand where they are.
function paintGaps(chart, rank, y) {
  const { start, end } = chart.gaps;
  const high = chart.gapStart[rank + 1];
  let gap = firstWhere(chart.gapStart[rank], high, (g) => end[g] >= view.from);
  for (; gap < high && start[gap] <= lastTime(); gap++) {
    for (const [name, from, to] of idlePieces(chart, rank, gap)) {
      const x = nearX(from);
      context.fillStyle = hatches[name];
      if (nearX(to) - x > 0.3) context.fillRect(x, y, nearX(to) - x, ROWS.cells);
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
  const { start, end, middle, fill, fill2 } = chart.cells;
  const columns = Math.ceil(plotWidth() + RIGHT) + 1;
  const sums = new Float64Array(4 * columns);
  const [zero, perTime] = [view.from, scale()];
  const add = (value, begin, finish) => {
    const low = Math.max((begin - zero) * perTime, 0);
    const high = Math.min((finish - zero) * perTime, columns);
    for (let column = Math.floor(low); column < high; column++) {
      const part = Math.min(high, column + 1) - Math.max(low, column);
      for (let i = 0; i < 3; i++) sums[4 * column + i] += FILL_RGB[3 * value + i] * part;
      sums[4 * column + 3] += part;
    }
  };
  for (let cell = from; cell < to; cell++) {
    const paired = fill2 && fill2[cell] !== NO_FILL;
    add(fill[cell], start[cell], paired ? middle[cell] : end[cell]);
    if (paired) add(fill2[cell], middle[cell], end[cell]);
  }
  const strength = chosen.microbatch < 0 ? 1 : 0.22;
  for (let column = 0; column < columns; column++) {
    const covered = sums[4 * column + 3];
    if (covered < 0.004) continue;
    const mean = [0, 1, 2].map((i) => Math.round(sums[4 * column + i] / covered));
    context.fillStyle = `rgb(${mean.join()})`;
    context.globalAlpha = strength * Math.min(covered, 1);
    context.fillRect(GUTTER + column, y, 1, ROWS.cells);
  }
  for (let cell = from; chosen.microbatch >= 0 && cell < to; cell++) {
    if (!holds(chart, cell, chosen.microbatch)) continue;
    opsOf(chart, cell).forEach((op, isSecond) => {
      if (op.microbatch !== chosen.microbatch) return;
      paintOp(chart, op, nearX(isSecond ? middle[cell] : start[cell]), nearX(end[cell]), y);
    });
  }
  context.globalAlpha = 1;
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
  const [zero, perTime] = [view.from, scale()];
  const raise = (begin, finish, value) => {
    const first = Math.max(0, Math.floor((begin - zero) * perTime));
    const last = Math.min(Math.floor((finish - zero) * perTime), columns.length - 1);
    for (let i = first; i <= last; i++) {
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
