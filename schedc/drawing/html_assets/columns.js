// Columns of numbers, read from the bytes that schedc/drawing/html_columns.py packs.
// Reads tables in the order in which they were packed: each as an object of typed arrays.
function tableReader(bytes) {
  let at = 0;
  const column = (count, { low, width, running, decimals, whole }) => {
    const values = new (whole ? Int32Array : Float64Array)(count).fill(low);
    for (let place = 1; width > 0; place *= 256, width--, at += count) {
      for (let i = 0; i < count; i++) values[i] += bytes[at + i] * place;
    }
    if (running) for (let i = 1; i < count; i++) values[i] += values[i - 1];
    const step = 10 ** decimals;
    if (decimals) for (let i = 0; i < count; i++) values[i] /= step;
    return values;
  };
  return ({ count, columns }) =>
    Object.fromEntries(Object.entries(columns).map(([name, head]) => [name, column(count, head)]));
}

// Times of every row, from the steps that it waits after the row before and the steps that it takes.
function withTimes({ wait, length, lead, ...rest }, decimals) {
  const step = 10 ** decimals;
  const [start, end, middle] = [0, 1, 2].map(() => new Float64Array(wait.length));
  let steps = 0; // whole, so that sums are exact
  for (let row = 0; row < wait.length; row++) {
    steps += wait[row];
    start[row] = steps / step;
    if (lead) middle[row] = (steps + lead[row]) / step;
    steps += length[row];
    end[row] = steps / step;
  }
  return { ...rest, start, end, middle };
}
