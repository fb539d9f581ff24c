// What stands around the drawing, as elements: figures, legend, tables of idle time.
function buildHeads() {
  for (const [number, chart] of charts.entries()) {
    const head = make("div", "", byId("heads"));
    make("h1", chart.title, head);
    const isSaid = chart.twin >= 0 && chart.twin < number;
    if (chart.summary && !isSaid) make("p", chart.summary, head);
    const facts = make("dl", "", head);
    facts.className = "facts";
    for (const [what, value] of chart.facts) {
      const fact = make("div", "", facts);
      make("dt", what, fact);
      make("dd", value, fact);
    }
  }
}

// A small canvas with each fill side by side, and what they mean.
function legendItem(fills, text, strength = 1) {
  const item = make("span", "", byId("legend"));
  const swatch = make("canvas", "", item);
  [swatch.width, swatch.height] = [60, 28];
  const pen = swatch.getContext("2d");
  pen.globalAlpha = strength;
  fills.forEach((fill, i) => {
    pen.fillStyle = fill;
    pen.fillRect((i * 60) / fills.length, 0, 60 / fills.length, 28);
  });
  item.append(text);
}

function buildLegend() {
  byId("legend").replaceChildren();
  const chunks = Math.max(...charts.map((chart) => Math.max(...chart.chunk.flat()) + 1));
  const used = new Set(charts.flatMap((chart) => chart.used));
  page.kinds.forEach((kind, value) => {
    if (used.has(value)) legendItem(page.fills[value].slice(0, chunks), `${kind.letter} ${kind.name}`);
  });
  if (chunks > 1) make("span", "pale: even chunks, deep: odd chunks; the numeral is the microbatch", byId("legend"));
  else make("span", "the numeral is the microbatch", byId("legend"));
  page.classes.forEach((name, i) => {
    const occurs = charts.some((chart) => chart.totals[i]?.some((total) => total > 0));
    if (occurs) legendItem([hatches[name]], `idle: ${name}`);
  });
  buildLanesLegend();
  legendItem([colours["curve-fill"], colours.curve], charts.map((chart) => `${chart.unit} held`)[0]);
  const phases = new Set(charts.length === 1 ? charts[0].phases : []);
  if (phases.size < 2) return;
  [...phases].slice(0, 12).forEach((name, i) => {
    legendItem([page.phaseTints[i % page.phaseTints.length]], `phase ${name}`, Number(colours["phase-strength"]));
  });
}

function buildTables() {
  for (const chart of charts) {
    const parent = byId("tables");
    make("h2", `Idle time of ${chart.title}`, parent);
    const box = make("div", "", parent);
    box.className = "wide";
    const table = make("table", "", box);
    const head = make("tr", "", make("thead", "", table));
    const classes = chart.classes.map((i) => page.classes[i]);
    const titles = ["rank", "busy", "bubble", ...classes, "of the makespan", `peak ${chart.unit}`];
    for (const title of titles) make("th", title, head).scope = "col";
    const body = make("tbody", "", table);
    const share = (bubble, ranks) =>
      chart.makespan > 0 ? `${((100 * bubble) / ranks / chart.makespan).toFixed(1)} %` : "";
    const fill = (row, values) => {
      for (const value of values) {
        const cell = make("td", typeof value === "number" ? shortNumber(value) : value, row);
        if (value === 0) cell.className = "zero";
      }
    };
    for (let rank = 0; rank < chart.ranks; rank++) {
      const row = make("tr", "", body);
      make("th", String(rank), row).scope = "row";
      const bubble = chart.bubble[rank];
      const parts = chart.classes.map((i) => chart.totals[i][rank]);
      fill(row, [chart.busy[rank], bubble, ...parts, share(bubble, 1), chart.peaks[rank]]);
    }
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    const foot = make("tr", "", make("tfoot", "", table));
    make("th", "all", foot).scope = "row";
    const all = sum(chart.bubble);
    const sums = chart.classes.map((i) => sum(chart.totals[i]));
    fill(foot, [sum(chart.busy), all, ...sums, share(all, chart.ranks), chart.highest]);
  }
}
