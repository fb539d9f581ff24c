// The schedules of the page: columns over cells, found by time, named, and the reason for each wait.
const EPSILON = 1e-9 * Math.max(page.longest, Number.MIN_VALUE);

// Colours of ops as bytes: a fill is 2 * kind + shade.
const FILL_RGB = page.fills.flat().flatMap((colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16)));
const NO_FILL = 255;

const readTable = tableReader(await inflated(page.packed));
const charts = page.charts.map((raw) => {
  const cells = withTimes(readTable(raw.tables.cells), raw.timeDecimals);
  for (let cell = 0; cell < cells.bound.length; cell++) cells.bound[cell] += cell;
  const gaps = withTimes(readTable(raw.tables.gaps), raw.timeDecimals);
  const parts = raw.classes.map((number) => [page.classes[number], gaps[`part${number}`]]);
  const critical = readTable(raw.tables.path).cell;
  const marked = new Uint8Array(cells.start.length);
  for (const cell of critical) marked[cell] = 1;
  const gapStart = new Int32Array(raw.ranks + 1);
  for (const rank of gaps.rank) gapStart[rank + 1]++;
  for (let rank = 0; rank < raw.ranks; rank++) gapStart[rank + 1] += gapStart[rank];
  const works = raw.works ? worksOf(raw, readTable(raw.tables.works)) : null;
  const above = stripsAbove(raw.ranks, works);
  const highest = raw.peaks.reduce((a, b) => Math.max(a, b), 0);
  const chart = { ...raw, cells, gaps, parts, critical, paired: "kind2" in cells, marked, gapStart, highest, works, above };
  cells.fill = fillsOf(chart, cells.kind, cells.stage, cells.microbatch);
  if (chart.paired) cells.fill2 = fillsOf(chart, cells.kind2, cells.stage2, cells.microbatch2);
  return chart;
});

function fillsOf(chart, kind, stage, microbatch) {
  const fillOf = (_, cell) => kind[cell] < 0 ? NO_FILL : 2 * kind[cell] + chunkOf(chart, stage[cell], microbatch[cell]) % 2;
  return Uint8Array.from(kind, fillOf);
}

const shortNumber = (value) => String(Number(value.toPrecision(6)));

// The first index in low ..< high whose value passes; the values pass from some index on.
function firstWhere(low, high, passes) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (passes(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

const rankOf = (chart, cell) => firstWhere(0, chart.ranks, (rank) => chart.rankStart[rank + 1] > cell);

// The ops of a cell: one, or the forward and the backward of an overlapped pair.
function opsOf(chart, cell) {
  const { kind, stage, microbatch, kind2, stage2, microbatch2 } = chart.cells;
  const ops = [{ kind: kind[cell], stage: stage[cell], microbatch: microbatch[cell] }];
  if (chart.paired && kind2[cell] >= 0) {
    ops.push({ kind: kind2[cell], stage: stage2[cell], microbatch: microbatch2[cell] });
  }
  return ops;
}

const letter = (op) => page.kinds[op.kind].letter;
const opName = (op) => `${op.stage}${letter(op)}${op.microbatch}`;
const cellName = (chart, cell) => opsOf(chart, cell).map(opName).join(" & ");

function pipeOf(chart, microbatch) {
  return firstWhere(0, chart.firstMicrobatch.length, (i) => chart.firstMicrobatch[i] > microbatch) - 1;
}

function chunkOf(chart, stage, microbatch) {
  return chart.chunk[pipeOf(chart, microbatch)][stage];
}

const holds = (chart, cell, microbatch) =>
  chart.cells.microbatch[cell] === microbatch || (chart.paired && chart.cells.microbatch2[cell] === microbatch);

// The cell that runs on a rank at a time, or -1.
function cellAt(chart, rank, time) {
  const { start, end } = chart.cells;
  const low = chart.rankStart[rank];
  const cell = firstWhere(low, chart.rankStart[rank + 1], (c) => start[c] > time) - 1;
  return cell >= low && time < end[cell] ? cell : -1;
}

// The gap that a rank has at a time, or -1.
function gapAt(chart, rank, time) {
  const low = chart.gapStart[rank];
  const gap = firstWhere(low, chart.gapStart[rank + 1], (g) => chart.gaps.start[g] > time) - 1;
  return gap >= low && time < chart.gaps.end[gap] ? gap : -1;
}

// Whether an op takes the output of another.
function takes(taker, maker) {
  const forward = letter(taker) === "F" && letter(maker) === "F" && maker.stage === taker.stage - 1;
  const backward = "BI".includes(letter(taker)) && "BI".includes(letter(maker)) && maker.stage === taker.stage + 1;
  return maker.microbatch === taker.microbatch && (forward || backward);
}

// The ops of `producer` whose outputs `cell` takes.
function outputNames(chart, producer, cell) {
  const takers = opsOf(chart, cell);
  const taken = opsOf(chart, producer).filter((maker) => takers.some((taker) => takes(taker, maker)));
  return taken.map(opName).join(" & ");
}

// The cell of an op, or -1.
function cellOf(chart, kind, stage, microbatch) {
  const { cells } = chart;
  const first = cells.kind.findIndex(
    (_, cell) => cells.microbatch[cell] === microbatch && cells.stage[cell] === stage && cells.kind[cell] === kind,
  );
  if (first >= 0 || !chart.paired) return first;
  return cells.kind2.findIndex(
    (_, cell) => cells.microbatch2[cell] === microbatch && cells.stage2[cell] === stage && cells.kind2[cell] === kind,
  );
}

// Why a cell starts when it does, in one sentence.
function reason(chart, cell) {
  if (chart.measured) return measuredReason(chart, cell);
  const { start, end, bound } = chart.cells;
  const rank = rankOf(chart, cell);
  const isFirst = cell === chart.rankStart[rank];
  const free = isFirst ? 0 : end[cell - 1];
  const waited = start[cell] - free;
  const producer = bound[cell];
  const stands = standsBetween(chart, rank, free, start[cell]);
  const stood = stands.map((stand) => describeStand(chart, stand)).join(", ");
  const rest = stands.reduce((time, [from, to]) => time - (to - from), waited);
  if (rest > EPSILON && producer >= 0) {
    const from = rankOf(chart, producer);
    const flight = chart.p2p > 0 && from !== rank ? `, whose message took ${shortNumber(chart.p2p)}` : "";
    const names = outputNames(chart, producer, cell);
    return `waited ${shortNumber(rest)} for ${names} on rank ${from}${flight}${stood && `, and ${stood}`}`;
  }
  if (stood) return stood;
  if (isFirst) return "no wait: first on its rank, at time 0";
  return `no wait: rank busy with ${cellName(chart, cell - 1)} until ${shortNumber(free)}`;
}

// The same of a run: what ended last of all that the cell needed, and how much later the cell began.
function measuredReason(chart, cell) {
  const { start, end, bound } = chart.cells;
  const last = bound[cell];
  if (last < 0) return "first on its rank, and needs nothing";
  const isBefore = last === cell - 1 && last >= chart.rankStart[rankOf(chart, cell)];
  const what = isBefore ? `followed ${cellName(chart, last)}` : `needed ${outputNames(chart, last, cell)} on rank ${rankOf(chart, last)}`;
  const later = start[cell] - end[last];
  const began = later < 0 ? "after it had begun" : `and began ${shortNumber(later)} later`;
  return `${what}, which ended at ${shortNumber(end[last])}, ${began}`;
}

function gapClasses(chart, gap) {
  const shares = chart.parts.map(([name, part]) => [name, part[gap]]).filter(([, share]) => share > 0);
  return shares.length === 1 ? shares[0][0] : shares.map(([name, share]) => `${name} ${shortNumber(share)}`).join(", ");
}

// What there is to say of a cell, line by line.
function describeCell(chart, cell) {
  const { start, end, phase, held, after } = chart.cells;
  const rank = rankOf(chart, cell);
  const ops = opsOf(chart, cell);
  const lines = [`${cellName(chart, cell)} on rank ${rank}` + (ops.length > 1 ? " (overlapped pair)" : "")];
  for (const op of ops) {
    const pipe = chart.chunk.length > 1 ? `, pipe ${pipeOf(chart, op.microbatch)}` : "";
    const chunk = chunkOf(chart, op.stage, op.microbatch);
    const place = `stage ${op.stage} (chunk ${chunk}${pipe})`;
    lines.push(`${page.kinds[op.kind].name} of microbatch ${op.microbatch}, ${place}`);
  }
  if (chart.phases[phase[cell]]) lines.push(`phase ${chart.phases[phase[cell]]}`);
  const twin = charts[chart.twin];
  if (twin) lines.push(...(chart.measured ? [chart, twin] : [twin, chart]).map((one) => describeTimes(one, cell)));
  else lines.push(`${shortNumber(start[cell])} to ${shortNumber(end[cell])}, cost ${shortNumber(end[cell] - start[cell])}`);
  const gap = gapAt(chart, rank, start[cell] - EPSILON);
  const waited = gap >= 0 && chart.gaps.cell[gap] === cell;
  lines.push(reason(chart, cell) + (waited ? ` (${gapClasses(chart, gap)})` : ""));
  lines.push(`${chart.unit} held${chart.measured ? " by the order" : ""}: at most ${shortNumber(held[cell])}, then ${shortNumber(after[cell])}`);
  if (chart.marked[cell]) lines.push("on the critical path");
  return lines;
}

// The run of cells of one phase that is drawn over a rank at a time, or nothing.
function describePhase(chart, rank, time) {
  const { start, end, phase } = chart.cells;
  const [low, high] = [chart.rankStart[rank], chart.rankStart[rank + 1]];
  let last = firstWhere(low, high, (cell) => start[cell] > time) - 1;
  if (last < low) return null;
  const number = phase[last];
  if (time >= end[last] && (last + 1 === high || phase[last + 1] !== number)) return null;
  let first = last;
  while (first > low && phase[first - 1] === number) first--;
  while (last + 1 < high && phase[last + 1] === number) last++;
  const count = last - first + 1;
  return [
    chart.phases[number] ? `phase ${chart.phases[number]} on rank ${rank}` : `no phase on rank ${rank}`,
    `${shortNumber(start[first])} to ${shortNumber(end[last])}, ${shortNumber(end[last] - start[first])} long`,
    `${count} cell${count > 1 ? "s" : ""}: ${cellName(chart, first)}` + (count > 1 ? ` to ${cellName(chart, last)}` : ""),
  ];
}

function describeTimes(chart, cell) {
  const { start, end } = chart.cells;
  const times = `${shortNumber(start[cell])} to ${shortNumber(end[cell])} ${page.timeUnit}`;
  return `${chart.measured ? "measured" : "predicted"}: ${times}, ${shortNumber(end[cell] - start[cell])} long`;
}

function describeGap(chart, gap) {
  const { start, end, cell, rank } = chart.gaps;
  const lines = [`idle on rank ${rank[gap]}: ${gapClasses(chart, gap)}`];
  lines.push(`${shortNumber(start[gap])} to ${shortNumber(end[gap])}, ${shortNumber(end[gap] - start[gap])} long`);
  lines.push(cell[gap] < 0 ? "nothing left to do" : `${cellName(chart, cell[gap])} ${reason(chart, cell[gap])}`);
  return lines;
}
