// The view in the address: what is seen and chosen, after the #, so that a copied address opens the same view.
const LINK_DELAY = 250; // ms without a change; browsers limit how often an address may change
let linkTimer = 0;

function linkSoon() {
  clearTimeout(linkTimer);
  linkTimer = setTimeout(writeLink, LINK_DELAY);
}

// Only what differs from the first view.
function linkText() {
  const link = new URLSearchParams();
  const isWhole = view.from === 0 && view.to === WHOLE;
  if (!isWhole) {
    link.set("from", Number(view.from.toPrecision(9)));
    link.set("to", Number(view.to.toPrecision(9)));
  }
  if (view.scroll > 0) link.set("scroll", Math.round(view.scroll));
  if (chosen.cell >= 0) link.set("cell", `${chosen.chart}:${opName(opsOf(charts[chosen.chart], chosen.cell)[0])}`);
  if (chosen.microbatch >= 0) link.set("microbatch", chosen.microbatch);
  if (chosen.critical) link.set("critical", 1);
  if (!chosen.classes) link.set("classes", 0);
  return String(link);
}

function writeLink() {
  const text = linkText();
  if (text === location.hash.slice(1)) return;
  try {
    history.replaceState(null, "", text ? `#${text}` : location.href.split("#")[0]);
  } catch {
    // a page inside another may have no address of its own
  }
}

// Shows what an address says behind its #; what it does not say, or says wrongly, is as in the first view.
function followLink(hash) {
  const link = new URLSearchParams(hash.slice(1));
  const number = (name, otherwise) => {
    const value = parseFloat(link.get(name) ?? "");
    return value >= 0 && value < Infinity ? value : otherwise;
  };
  for (const name of ["critical", "classes"]) {
    chosen[name] = number(name, name === "classes" ? 1 : 0) !== 0;
    byId(name).checked = chosen[name];
  }
  clear();
  const [, chart, stage, kind, microbatch] = /^(\d+):(\d+)([A-Z])(\d+)$/.exec(link.get("cell") ?? "") ?? [];
  if (charts[chart]) {
    const cell = cellOf(charts[chart], page.kinds.findIndex(({ letter }) => letter === kind), +stage, +microbatch);
    if (cell >= 0) choose(Number(chart), cell);
  }
  setMicrobatch(Math.floor(number("microbatch", -1)));
  const [from, to] = [number("from", 0), number("to", WHOLE)];
  if (from < to) setRange(from, to);
  else setRange(0, WHOLE);
  box.scrollTop = number("scroll", 0);
}
