// Sliders of constants and of figures of the cluster: one is moved at a time, and the plans stand in the order they have
// there. Steps between the values that were priced are interpolated.
const MOST_LINES = 20;
const sliders = facts.sliders ?? { plans: [], settings: [], no_effect: [] };
const settings = sliders.settings;
const SCALES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "u"], [1e-9, "n"]];
const SCALED = ["s", "B/s", "FLOP/s"];
const needed = sliders.plans.map((file) => plans.find((plan) => plan.file === file)?.memory.needed_bytes ?? facts.explain?.needed_bytes);
const drawn = sliders.plans.map((_, number) => number).filter((number) => number < MOST_LINES || sliders.plans[number] === "asked");
const lines = { svg: null, x: null, y: null, scale: 1 };
const inputs = [];
const places = new Map();
let lineKeys = {};

// moved: number of a setting. value: that of its slider.
const moving = { moved: 0, value: settings[0]?.value };

// Colours come again after ten plans, then with dashes.
const lineOf = (plan) => `line${plan % 10}${plan % 20 > 9 ? " dashed" : ""}`;

function scaleOf(value, unit) {
  if (!SCALED.includes(unit)) return [1, unit];
  const [scale, letter] = SCALES.find(([least]) => value >= least) ?? SCALES.at(-1);
  return [scale, letter + unit];
}

function withPrefix(value, unit) {
  const [scale, word] = scaleOf(value, unit);
  return `${Number((value / scale).toPrecision(4))} ${word}`.trim();
}

// How far a value is from the setting's own, in words.
function farText(setting, value) {
  const far = Math.log(value / setting.value);
  if (Math.abs(far) < 1e-9) return "as it is";
  if (setting.width === null) return `× ${Number((value / setting.value).toPrecision(3))}`;
  const widths = far / setting.width;
  return `${widths < 0 ? "−" : "+"}${Math.abs(widths).toFixed(1)} widths`;
}

// Seconds of a plan at a value, on a line between the values around it; null where it does not fit.
function stepAt(setting, value, plan) {
  const { values, steps_s: steps } = setting;
  const own = values.indexOf(setting.value);
  if (setting.name === "device.usable") {
    return needed[plan] <= facts.cluster.usable_bytes * (value / setting.value) * (1 + 1e-12) ? steps[own][plan] : null;
  }
  const above = Math.min(Math.max(1, values.findIndex((each) => each >= value)), values.length - 1);
  const share = Math.log(value / values[above - 1]) / Math.log(values[above] / values[above - 1]);
  return steps[above - 1][plan] + share * (steps[above][plan] - steps[above - 1][plan]);
}

// By how many per cent a plan takes longer than the first one at a value; null where it does not fit.
function longer(setting, value, plan) {
  const own = setting.values.indexOf(setting.value);
  const step = stepAt(setting, value, plan);
  return step === null ? null : 100 * (step / (stepAt(setting, value, 0) ?? setting.steps_s[own][0]) - 1);
}

function buildSliders() {
  if (!settings.length) return;
  byId("moved").hidden = false;
  byId("moved-note").textContent = "One constant or figure moves, and all others stay as they are. "
    + "Dots are prices; steps between them are interpolated. Plans that are not listed are not priced again."
    + (drawn.length < sliders.plans.length ? ` The best ${MOST_LINES} plans are drawn.` : "");
  for (const [title, ofConstants] of [["constants", true], ["figures of the cluster", false]]) {
    const own = settings.map((_, number) => number).filter((number) => (settings[number].width !== null) === ofConstants);
    if (own.length) make("h3", title, byId("settings"));
    own.forEach(buildSlider);
  }
  if (sliders.no_effect.length) byId("no-effect").textContent = `Without effect on these plans: ${sliders.no_effect.join(", ")}.`;
  const words = { viewBox: `0 0 ${PLOT.width} ${PLOT.height}`, role: "img", "aria-labelledby": "setting-head" };
  lines.svg = draw("svg", words, byId("moved-plot"));
  byId("ranking").setAttribute("aria-label", "plans, the fastest first");
  for (const plan of drawn) buildPlace(plan);
  const middle = () => [lines.x.at(moving.value / lines.scale), lines.y.at(0)];
  lineKeys = zooming(lines.svg, byId("moved-zoom"), () => lines, middle, showLines);
  byId("moved").addEventListener("keydown", (event) => {
    if (!lineKeys[event.key]) return;
    event.stopPropagation();
    lineKeys[event.key]();
  });
  moveTo(moving.moved, moving.value);
}

function buildSlider(number) {
  const setting = settings[number];
  const row = make("div", "", byId("settings"));
  row.className = "setting";
  const label = make("label", setting.name, row);
  const input = make("input", "", row);
  const [low, high] = [setting.values[0], setting.values.at(-1)].map((value) => Math.log(value / setting.value));
  Object.assign(input, { type: "range", id: `setting${number}`, min: low, max: high, step: "any" });
  label.htmlFor = input.id;
  label.title = setting.says;
  make("span", "", row).className = "value";
  make("span", "", row).className = "far";
  const valueOf = () => {
    const value = setting.value * Math.exp(Number(input.value));
    return setting.whole ? Math.round(value) : value;
  };
  input.addEventListener("input", () => moveByHand(number, valueOf()));
  input.addEventListener("focus", () => number !== moving.moved && moveByHand(number, setting.value));
  input.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    input.value = Number(input.value) + (step * (high - low)) / (event.shiftKey ? 20 : 120);
    moveByHand(number, valueOf());
  });
  input.addEventListener("dblclick", () => moveByHand(number, setting.value));
  inputs[number] = { input, row };
}

// Shows the plans at a value of a setting; all others go back to their own.
function moveTo(number, value) {
  const setting = settings[number];
  const another = lines.x === null || number !== moving.moved;
  Object.assign(moving, { moved: number, value: Math.min(Math.max(value, setting.values[0]), setting.values.at(-1)) });
  settings.forEach((each, at) => {
    const own = at === number ? moving.value : each.value;
    const { input, row } = inputs[at];
    if (Math.abs(Number(input.value) - Math.log(own / each.value)) > 1e-9 || at !== number) input.value = Math.log(own / each.value);
    const texts = [withPrefix(own, each.unit), farText(each, own)];
    [row.children[2].textContent, row.children[3].textContent] = texts;
    input.ariaValueText = texts.join(", ");
    row.classList.toggle("moved", at === number);
  });
  byId("setting-head").textContent = `${setting.name}: ${setting.says}`;
  if (another) aimLines(setting);
  showLines();
  showRanking(setting);
}

function moveByHand(number, value) {
  moveTo(number, value);
  writeLink();
}

function aimLines(setting) {
  const { width, height, left, right, top, bottom } = PLOT;
  const values = drawn.flatMap((plan) => setting.values.map((value) => longer(setting, value, plan)));
  const [scale] = scaleOf(setting.value, setting.unit);
  const [first, last] = [setting.values[0] / scale, setting.values.at(-1) / scale];
  const room = (last / first) ** 0.02;
  lines.x = makeAxis(first / room, last * room, left, width - right, true);
  lines.scale = scale;
  lines.y = makeAxis(...withRoom(values.filter((value) => value !== null)), height - bottom, top);
}

function showLines() {
  const setting = settings[moving.moved];
  const { svg, x, y, scale } = lines;
  const [, unit] = scaleOf(setting.value, setting.unit);
  const title = unit ? `${setting.name}, ${unit}` : setting.name;
  const inside = drawFrame(svg, x, y, [title, `longer than ${sliders.plans[0]}, %`]);
  const { top, height, bottom } = PLOT;
  const upright = (value, name) => {
    const at = x.at(value / scale);
    draw("line", { x1: at, x2: at, y1: top, y2: height - bottom, class: name }, inside);
  };
  upright(setting.value, "own");
  if (moving.value !== setting.value) upright(moving.value, "limit");
  for (const plan of drawn) {
    const dots = setting.values
      .map((value) => [x.at(value / scale), longer(setting, value, plan)])
      .filter(([, step]) => step !== null)
      .map(([at, step]) => [at, y.at(step)]);
    draw("polyline", { points: dots.map((dot) => dot.join()).join(" "), class: `line ${lineOf(plan)}` }, inside);
    for (const [cx, cy] of dots) draw("circle", { cx, cy, r: 2.5, class: `dot ${lineOf(plan)}` }, inside);
  }
  for (const tie of setting.ties) {
    const plan = sliders.plans.indexOf(tie.plan);
    const [cx, cy] = [x.at(tie.value / scale), y.at(longer(setting, tie.value, plan) ?? 0)];
    const mark = draw("circle", { cx, cy, r: 6, class: "tie" }, inside);
    const words = setting.name === "device.usable" ? `${sliders.plans[0]} does not fit below` : "as fast as the first plan";
    const said = [tie.plan, `${words}: ${withPrefix(tie.value, setting.unit)}`, `${seconds(tie.step_s)} s`, farText(setting, tie.value)];
    mark.addEventListener("pointermove", (event) => showTip(said, event.clientX, event.clientY));
    mark.addEventListener("pointerleave", () => showTip(null));
  }
}

// A plan among the others at the value of the slider: its colour, its name, its step, and what it takes longer.
function buildPlace(plan) {
  const item = make("li", "", byId("ranking"));
  item.className = lineOf(plan);
  make("i", "", item).className = "mark";
  make("span", sliders.plans[plan], item);
  make("span", "", item).className = "value";
  make("span", "", item).className = "value";
  places.set(plan, item);
}

// The plans at the value of the slider, the fastest first.
function showRanking(setting) {
  const steps = new Map(drawn.map((plan) => [plan, stepAt(setting, moving.value, plan) ?? Infinity]));
  const order = drawn.toSorted((a, b) => (steps.get(a) < steps.get(b) ? -1 : steps.get(a) > steps.get(b) ? 1 : a - b));
  const fastest = steps.get(order[0]);
  for (const [plan, item] of places) {
    const step = steps.get(plan);
    const more = 100 * (step / fastest - 1);
    item.children[2].textContent = step === Infinity ? "does not fit" : `${seconds(step)} s`;
    item.children[3].textContent = more >= 0.05 && step < Infinity ? `+${more.toFixed(1)} %` : "";
  }
  byId("ranking").append(...order.map((plan) => places.get(plan)));
  const first = fastest === Infinity ? "no plan fits" : `${sliders.plans[order[0]]} is the fastest of these plans`;
  byId("moved-said").textContent = `${first} at ${withPrefix(moving.value, setting.unit)} (${farText(setting, moving.value)})`;
}
