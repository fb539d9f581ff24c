// Prices fixed orders: each rank runs its ops in order, each as soon as what it waits for is there.
const words = new Uint32Array((await inflated(page.orders)).buffer);
const points = page.facts.points;
let offset = 0;
const orders = page.starts.map((starts) => {
  const first = offset;
  offset += starts.at(-1);
  return { starts, words: words.subarray(first, offset) };
});

// The times of a point under costs of a microbatch on a rank: start and end of every op, the makespan, the bubble.
function priced(number, costs) {
  const { starts, words: ops } = orders[number];
  const v = points[number].per_rank, count = page.facts.microbatches, ranks = starts.length - 1;
  const stages = v * ranks;
  const time = [costs.F, costs.I, costs.W, costs.I + costs.W].map((each) => each / v);
  const forward = new Float64Array(stages * count).fill(-1), back = new Float64Array(stages * count).fill(-1);
  const home = new Int16Array(stages * count);
  for (let rank = 0; rank < ranks; rank++) {
    for (let row = starts[rank]; row < starts[rank + 1]; row++) home[slotOf(ops[row], count)] = rank;
  }
  const start = new Float64Array(ops.length), end = new Float64Array(ops.length);
  const place = starts.slice(0, -1), free = new Float64Array(ranks), busy = new Float64Array(ranks);
  const ready = (op, rank) => {
    const turn = op & 3, stage = (op >> 2) & 1023, slot = slotOf(op, count);
    if (turn === 2) return back[slot];
    const far = turn === 0 ? stage > 0 ? slot - count : -1 : stage < stages - 1 ? slot + count : -1;
    if (far < 0) return turn === 0 ? 0 : forward[slot];
    const there = turn === 0 ? forward[far] : back[far];
    return there < 0 ? -1 : there + (home[far] === rank ? 0 : costs.p2p);
  };
  for (let moved = true; moved;) {
    moved = false;
    for (let rank = 0; rank < ranks; rank++) {
      while (place[rank] < starts[rank + 1]) {
        const row = place[rank], pair = row + 1 < starts[rank + 1] && ops[row + 1] >> 24 & 1;
        const cell = pair ? [row, row + 1] : [row];
        const waits = cell.map((each) => ready(ops[each], rank));
        if (Math.min(...waits) < 0) break;
        const at = Math.max(free[rank], ...waits);
        const long = cell.reduce((sum, each) => sum + time[ops[each] & 3], 0);
        for (const each of cell) {
          start[each] = at;
          end[each] = at + long;
          const turn = ops[each] & 3;
          if (turn !== 2) (turn === 0 ? forward : back)[slotOf(ops[each], count)] = at + long;
        }
        free[rank] = at + long;
        busy[rank] += long;
        place[rank] += cell.length;
        moved = true;
      }
    }
  }
  const makespan = Math.max(...free);
  return { start, end, makespan, bubble: makespan - Math.max(...busy) };
}

function slotOf(op, count) {
  return ((op >> 2) & 1023) * count + ((op >> 12) & 4095);
}
