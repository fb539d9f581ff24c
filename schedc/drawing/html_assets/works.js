// Works and copies of experts beside compute: a strip per lane under the ranks that use it, and times at JOINs.

// A chart's works, in order of rank, lane and time; strips: by rank, the rows of each lane in use.
function worksOf(raw, columns) {
  const strips = Array.from({ length: raw.ranks }, () => []);
  const { rank, lane } = columns;
  for (let row = 0; row < rank.length; row++) {
    const last = strips[rank[row]].at(-1);
    if (last?.lane === lane[row]) last.to = row + 1;
    else strips[rank[row]].push({ lane: lane[row], from: row, to: row + 1 });
  }
  return { ...raw.works, ...columns, strips };
}

// Strips above each rank of a chart, and above its end.
function stripsAbove(ranks, works) {
  const above = new Int32Array(ranks + 1);
  for (let rank = 0; rank < ranks; rank++) above[rank + 1] = above[rank] + (works ? works.strips[rank].length : 0);
  return above;
}

const stripsOf = (chart, rank) => (chart.works ? chart.works.strips[rank] : []);

// The work that a strip of a rank shows at a time, or -1.
function workAt(chart, rank, strip, time) {
  const { from, to } = stripsOf(chart, rank)[strip];
  const row = firstWhere(from, to, (work) => chart.works.begin[work] > time) - 1;
  return row >= from && time < chart.works.finish[row] ? row : -1;
}

// The times that a rank stands at JOINs between two times, in order: [from, to, work].
function standsBetween(chart, rank, low, high) {
  const stands = [];
  for (const { from, to } of stripsOf(chart, rank)) {
    const { finish, exposed, kind, joined } = chart.works;
    for (let row = firstWhere(from, to, (work) => finish[work] > low + EPSILON); row < to; row++) {
      if (finish[row] > high + EPSILON) break;
      if (exposed[row] > 0 && kind[row] < joined) stands.push([finish[row] - exposed[row], finish[row], row]);
    }
  }
  return stands.sort((a, b) => a[0] - b[0]);
}

// An idle interval as [class, from, to]: times at JOINs where they are, the other classes in their order around them.
function* idlePieces(chart, rank, gap) {
  const { start, end } = chart.gaps;
  if (!chosen.classes) return yield ["idle", start[gap], end[gap]];
  const stands = standsBetween(chart, rank, start[gap], end[gap]);
  for (const [from, to] of stands) yield ["exposed", from, to];
  let [time, next] = [start[gap], 0];
  for (const [name, part] of chart.parts) {
    let left = name === "exposed" ? 0 : part[gap];
    while (left > EPSILON) {
      while (next < stands.length && stands[next][0] <= time + EPSILON) time = Math.max(time, stands[next++][1]);
      const length = next < stands.length ? Math.min(left, stands[next][0] - time) : left;
      yield [name, time, time + length];
      time += length;
      left -= length;
    }
  }
}

function paintStrips(chart, rank, y) {
  stripsOf(chart, rank).forEach((strip, place) => paintStrip(chart, strip, y + place * ROWS.works));
}

function paintStrip(chart, { lane, from, to }, y) {
  const { begin, finish, microbatch, fills } = chart.works;
  context.font = `${ROWS.works - 2}px ${FONT}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let row = firstWhere(from, to, (work) => finish[work] >= view.from); row < to; row++) {
    if (begin[row] > lastTime()) break;
    const [left, right] = [nearX(begin[row]), nearX(finish[row])];
    const width = right - left;
    context.globalAlpha = chosen.microbatch < 0 || chosen.microbatch === microbatch[row] ? 1 : 0.22;
    context.fillStyle = fills[lane];
    context.fillRect(left, y + 1, width >= 4 ? width - 1 : Math.max(width, 0.5), ROWS.works - 1);
    const text = numeralOfWork(chart, row);
    if (width < 6 * text.length + 3) continue;
    context.fillStyle = page.inks[0];
    context.fillText(text, (left + right) / 2 - 0.5, y + ROWS.works / 2 + 1);
  }
  context.globalAlpha = 1;
}

function paintLaneNames(chart, rank, y) {
  context.font = `${Math.min(ROWS.works - 1, 9)}px ${FONT}`;
  context.fillStyle = colours.muted;
  context.textAlign = "right";
  stripsOf(chart, rank).forEach(({ lane }, place) => {
    context.fillText(chart.works.lanes[lane], GUTTER - 6, y + (place + 0.5) * ROWS.works + 0.5);
  });
}

// What stands in a work: its microbatch; of one that concerns a stage two letters of its kind, and the stage.
function numeralOfWork({ works }, row) {
  const { kinds, kind, joined, stage, microbatch } = works;
  const short = kinds[kind[row]].slice(0, kind[row] < joined ? 2 : 1);
  return microbatch[row] < 0 ? `${short}${stage[row]}` : String(microbatch[row]);
}

function workName({ works }, row) {
  const layer = works.layer[row] < 0 ? "" : `, layer ${works.layer[row]}`;
  const name = `${works.kinds[works.kind[row]]} of stage ${works.stage[row]}${layer}`;
  return works.microbatch[row] < 0 ? name : `${name}, microbatch ${works.microbatch[row]}`;
}

// What there is to say of a work, line by line.
function describeWork(chart, row) {
  const { rank, lane, lanes, size, sizes, begin, finish, exposed, kind, joined } = chart.works;
  const place = kind[row] < joined ? "at its JOIN" : "for it inside a cell";
  return [
    `${workName(chart, row)} on rank ${rank[row]}`,
    `lane ${lanes[lane[row]]}` + (sizes[size[row]] ? `, moves ${sizes[size[row]]}` : ""),
    `${shortNumber(begin[row])} to ${shortNumber(finish[row])}, ${shortNumber(finish[row] - begin[row])} long`,
    exposed[row] > 0 ? `the rank stands ${shortNumber(exposed[row])} ${place}` : "nothing exposed",
  ];
}

const describeStand = (chart, [from, to, row]) =>
  `stood ${shortNumber(to - from)} at the JOIN of the ${workName(chart, row)}`;

function buildLanesLegend() {
  const texts = new Map();
  for (const { works } of charts) {
    for (const [fill, text] of works ? works.legend : []) texts.set(text, fill);
  }
  for (const [text, fill] of texts) legendItem([fill], text);
}
