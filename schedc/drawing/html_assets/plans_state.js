// What is chosen on a page of plans, how its values read, and the address that says so.
const { facts, texts, columns } = page;
const plans = [...facts.plans, ...(facts.also ?? [])];
const GB = 1e9;

// chosen, beside: numbers of plans; beside is -1 for none. order: numbers of plans from the top of the table.
const state = { chosen: plans.length ? 0 : -1, beside: -1, sorted: "", down: false, order: plans.map((_, i) => i) };

const seconds = (value) => value.toPrecision(4);
const gigabytes = (value) => (value / GB).toFixed(1);
const placeOf = (number) => `${number + 1}`;
const shortName = (number) => planName(number).replace(/^0*(\d+)\.sched$/, "$1");
const word = (value) => value === true ? "yes" : value === false ? "no" : String(value);

function planName(number) {
  return plans[number].file || `plan ${placeOf(number)}`;
}

// Lines of the tooltip: what a plan takes and holds, and its axes.
function describePlan(number) {
  const plan = plans[number];
  const within = `, 90 % within ${seconds(plan.step_low_s)} to ${seconds(plan.step_high_s)} s`;
  const free = plan.free.length ? [`free: ${plan.free.join(", ")}`] : [];
  return [
    `${placeOf(number)}: ${planName(number)}`,
    `${seconds(plan.step_s)} s${within}`,
    `${gigabytes(plan.memory.needed_bytes)} GB on rank ${plan.memory.rank}`,
    ...Object.entries(plan.axes).map(([name, value]) => `${name} ${word(value)}`),
    ...free,
  ];
}

function choose(number) {
  if (number === state.beside) state.beside = state.chosen;
  state.chosen = number;
  showAll();
}

function putBeside(number) {
  state.beside = number === state.chosen ? -1 : number;
  showAll();
}

function walk(step) {
  const at = state.order.indexOf(state.chosen) + step;
  if (at < 0 || at >= plans.length) return;
  choose(state.order[at]);
  rowOf(state.chosen).scrollIntoView({ block: "nearest" });
}

function writeLink() {
  const link = new URLSearchParams();
  if (state.chosen > 0) link.set("plan", placeOf(state.chosen));
  if (state.beside >= 0) link.set("beside", placeOf(state.beside));
  if (settings.length && moving.value !== settings[moving.moved].value) {
    link.set("vary", settings[moving.moved].name);
    link.set("at", String(Number(moving.value.toPrecision(6))));
  }
  const text = String(link);
  try {
    history.replaceState(null, "", text ? `#${text}` : location.href.split("#")[0]);
  } catch {
    // a page inside another may have no address of its own
  }
}

// Chooses what the address says; what it does not say, or says wrongly, stays as it is.
function followLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  const number = (name) => (plans[Number(link.get(name)) - 1] ? Number(link.get(name)) - 1 : -1);
  if (number("plan") >= 0) state.chosen = number("plan");
  if (link.has("beside")) state.beside = number("beside");
  if (state.beside === state.chosen) state.beside = -1;
  const moved = settings.findIndex((setting) => setting.name === link.get("vary"));
  if (moved >= 0 && Number(link.get("at")) > 0) moveTo(moved, Number(link.get("at")));
}
