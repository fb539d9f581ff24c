// What the reader of a page of plans does: mouse, keys and address.
function showAll() {
  if (state.chosen < 0) return;
  showTip(null);
  showPlot();
  showTable();
  showBarsOfChosen();
  showPicture();
  writeLink();
  Object.assign(document.body.dataset, { chosen: state.chosen, beside: state.beside });
}

const KEYS = {
  ArrowUp: () => walk(-1),
  ArrowDown: () => walk(1),
  Home: () => choose(state.order[0]),
  End: () => choose(state.order[plans.length - 1]),
  b: () => putBeside(nextBeside()),
  Escape: () => putBeside(state.chosen),
};

// The plan beside the chosen one that `b` shows next: from the best one on, round and round.
function nextBeside() {
  const others = plans.map((_, i) => i).filter((number) => number !== state.chosen);
  return others[(others.indexOf(state.beside) + 1) % others.length] ?? state.chosen;
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || ["SELECT", "INPUT"].includes(event.target.tagName)) return;
  const action = plans.length && (KEYS[event.key] ?? plotKeys[event.key]);
  if (!action) return;
  event.preventDefault();
  action();
}

buildHead();
if (plans.length) {
  buildTable();
  buildPlot();
  buildSliders();
  if (page.beside >= 0) state.beside = page.beside;
  followLink();
}
for (const part of ["views", "timeline"]) byId(part).hidden = !plans.length;
showAll();
addEventListener("keydown", onKey);
addEventListener("hashchange", () => {
  followLink();
  showAll();
});
document.body.dataset.ready = "yes";
