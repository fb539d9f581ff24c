// What stands around the plot: figures, waterfall and memory as bars, the table of plans, and the timeline.
const rows = [];
const rowOf = (number) => rows[number];

function buildHead() {
  byId("title").textContent = texts.title;
  byId("certificate").textContent = texts.certificate;
  for (const [what, value] of texts.facts) {
    const fact = make("div", "", byId("facts"));
    make("dt", what, fact);
    make("dd", value, fact);
  }
  for (const remark of texts.remarks) make("li", remark, byId("remarks"));
  const select = byId("beside");
  make("option", "none", select).value = "-1";
  plans.forEach((_, number) => (make("option", planName(number), select).value = String(number)));
  select.addEventListener("change", () => putBeside(Number(select.value)));
}

function buildTable() {
  byId("same").textContent = texts.same;
  const head = make("tr", "", make("thead", "", byId("plans")));
  for (const { title, word: isWord } of columns) {
    const cell = make("th", "", head);
    cell.className = isWord ? "word" : "";
    cell.scope = "col";
    const button = make("button", title, cell);
    button.type = "button";
    button.addEventListener("click", () => sortBy(title));
  }
  const body = make("tbody", "", byId("plans"));
  plans.forEach((plan, number) => {
    const row = make("tr", "", body);
    row.tabIndex = 0;
    columns.forEach(({ cells, word: isWord }) => (make("td", cells[number], row).className = isWord ? "word" : ""));
    row.addEventListener("click", (event) => (event.shiftKey ? putBeside(number) : choose(number)));
    row.addEventListener("keydown", (event) => {
      if (event.key === "Enter") choose(number);
    });
    rows.push(row);
  });
}

// Sorts by a column; a second time the other way round. Equal plans keep the order of the search.
function sortBy(title) {
  state.down = state.sorted === title && !state.down;
  state.sorted = title;
  const { values } = columns.find((column) => column.title === title);
  const before = (a, b) => (a === b ? 0 : a < b ? -1 : 1);
  const sign = state.down ? -1 : 1;
  state.order = plans.map((_, i) => i).sort((a, b) => sign * before(values[a], values[b]) || a - b);
  byId("plans").tBodies[0].append(...state.order.map(rowOf));
  [...byId("plans").tHead.rows[0].cells].forEach((cell, number) => {
    cell.ariaSort = columns[number].title !== title ? null : state.down ? "descending" : "ascending";
  });
}

function showTable() {
  rows.forEach((row, number) => {
    row.classList.toggle("first", number === state.chosen);
    row.classList.toggle("second", number === state.beside);
    row.ariaSelected = String(number === state.chosen);
    columns.forEach(({ cells }, at) => {
      const isOther = state.beside >= 0 && number === state.beside && cells[number] !== cells[state.chosen];
      row.cells[at].classList.toggle("other", isOther);
    });
  });
}

const LEAST = 1e-6; // of the whole: smaller differences are rounding

// A row of bars: a name, one or two bars from where the last ones ended, the value and its difference. None is negative.
function bar(parent, name, spans, whole, value, difference, style = "") {
  make("div", name, parent).className = style;
  const lane = make("div", "", parent);
  lane.className = spans.length > 1 ? "lane two" : "lane";
  spans.forEach(([from, length], number) => {
    if (!length) return;
    const span = make("span", "", lane);
    span.className = number ? "second" : "first";
    span.style.left = `${(100 * from) / whole}%`;
    span.style.width = `${(100 * length) / whole}%`;
  });
  make("div", value, parent).className = `value ${style}`;
  const differs = Math.abs(difference ?? 0) > LEAST * whole;
  const change = differs ? `${difference < 0 ? "−" : "+"}${seconds(Math.abs(difference))}` : "";
  const sense = !differs ? "" : difference < 0 ? "less" : "more";
  make("div", change, parent).className = `value ${style} ${sense}`;
}

// Bars of [name, value] by plan, each from where the one before ended, and their sum.
function showBars(parent, pairs, format, total) {
  parent.replaceChildren();
  const sums = pairs.map(() => 0);
  const names = [...new Set(pairs.flatMap((pair) => [...pair.keys()]))];
  const whole = Math.max(...total, Number.MIN_VALUE);
  for (const name of names) {
    const values = pairs.map((pair) => pair.get(name) ?? 0);
    const spans = values.map((value, i) => [sums[i], value]);
    values.forEach((value, i) => (sums[i] += value));
    bar(parent, name, spans, whole, format(values[0]), values.length > 1 ? values[0] - values[1] : null);
  }
  bar(parent, "sum", total.map((value) => [0, value]), whole, format(total[0]), total.length > 1 ? total[0] - total[1] : null, "sum");
}

function showBarsOfChosen() {
  const numbers = state.beside < 0 ? [state.chosen] : [state.chosen, state.beside];
  const shown = numbers.map((number) => plans[number]);
  byId("first").textContent = `${planName(state.chosen)}: ${seconds(shown[0].step_s)} s`;
  byId("beside").value = String(state.beside);
  const falls = shown.map((plan) => new Map(plan.waterfall.map(({ what, seconds: each }) => [what, each])));
  showBars(byId("waterfall"), falls, (value) => `${seconds(value)} s`, shown.map((plan) => plan.step_s));
  const parts = shown.map((plan) => new Map(Object.entries(plan.memory.parts).map(([name, each]) => [name, each / GB])));
  const peaks = shown.map((plan) => plan.memory.needed_bytes / GB);
  showBars(byId("memory"), parts, (value) => `${value.toFixed(2)} GB`, peaks);
  byId("difference").textContent = shown.length > 1 ? difference(...shown) : "";
}

function difference(first, second) {
  const gap = first.step_s - second.step_s;
  if (gap === 0) return "Both take the same time.";
  const share = ((100 * Math.abs(gap)) / Math.max(first.step_s, second.step_s)).toFixed(1);
  return `${seconds(Math.abs(gap))} s ${gap < 0 ? "faster" : "slower"} (${share} %); differences are signed so.`;
}

async function showPicture() {
  const packed = page.pictures[plans[state.chosen].file];
  byId("timeline").hidden = !packed;
  if (!packed) return;
  const number = state.chosen;
  const text = new TextDecoder().decode(await inflated(packed));
  if (number !== state.chosen) return; // another plan was chosen meanwhile
  byId("picture").src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  byId("picture").alt = `Timeline of ${planName(number)}`;
}
