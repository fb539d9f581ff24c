// The page of the playground: the text on the left, what the compiler says of it on the right.
import { Compiler } from "./compiler.js";
import { Editor } from "./editor.js";
import { packed, unpacked } from "./link.js";
import { claimRow, comparison, field, figures, findingRow } from "./parts.js";

const COSTS = { F: 1, I: 1, W: 1, p2p: 0, FB: "" };
const PAUSE = 250;
const $ = (id) => document.getElementById(id);

// name: the library schedule whose text stands in the editor, unchanged; empty for a text of one's own.
const state = {
  name: "dualpipev", text: "", form: "sched", schedule: "", sizes: {}, costs: {}, memory: 0, layout: "", view: "drawing",
};
let library = new Map();
let round = 0;
let pause;

const compiler = new Compiler((text) => ($("state").textContent = text));
const editor = new Editor($("text"), written, (request) => ask(request));

function ask(request) {
  const { name, text, form, schedule, sizes, costs, layout } = state;
  return compiler.ask({ name, text, form, schedule, sizes, costs, layout, ...request });
}

function written() {
  state.text = editor.text;
  state.name = library.get(state.name) === state.text ? state.name : "";
  $("library").value = state.name;
  later();
}

function later() {
  clearTimeout(pause);
  pause = setTimeout(draw, PAUSE);
}

function tell(error) {
  $("state").textContent = error.message;
}

async function draw() {
  round += 1;
  const mine = round;
  await drawRound(mine).catch((error) => mine === round && showNothing(error));
  document.body.dataset.round = String(mine);
}

// Several requests may be under way: only what answers the last one is shown.
async function drawRound(mine) {
  history.replaceState(null, "", `#${await packed(state.name ? { ...state, text: "" } : state)}`);
  const drawn = await ask({ do: "draw" });
  if (mine !== round) return;
  show(drawn);
  if (state.form === "sched") {
    const { tokens } = await ask({ do: "colour" });
    if (mine === round) editor.colour(tokens);
  }
  if (mine === round) await VIEWS[state.view](mine);
  if (mine === round && state.layout) await layOut(mine);
}

function show({ sizes, schedules, facts, svg, error }) {
  const diagnostics = facts?.diagnostics ?? [];
  fields("sizes", sizes, state.sizes);
  fields("costs", COSTS, state.costs);
  $("several").hidden = schedules.length < 2;
  $("schedules").replaceChildren(...schedules.map((each) => new Option(each, each, false, each === state.schedule)));
  $("figures").textContent = facts && "makespan" in facts ? figures(facts) : "";
  $("drawing").innerHTML = svg;
  $("claims").replaceChildren(...(facts?.expect ?? []).map(claimRow));
  $("findings").replaceChildren(
    ...diagnostics.map((each) => findingRow(each, () => editor.go(each.line, each.column))),
    ...(error ? [findingRow({ code: "", message: error })] : []),
  );
  $("state").textContent = diagnostics.length || error ? "" : "checked";
  editor.find(diagnostics);
}

// The reason stays until the next drawing, also while the compiler starts again.
function showNothing({ message }) {
  $("figures").textContent = "";
  for (const id of ["drawing", "claims"]) $(id).replaceChildren();
  $("findings").replaceChildren(findingRow({ code: "", message }));
}

// One number for each name; what is empty takes the default.
function fields(id, defaults, given) {
  const names = Object.keys(defaults);
  const box = $(id);
  if (box.dataset.names === names.join() && box.dataset.defaults === Object.values(defaults).join()) return;
  box.dataset.names = names.join();
  box.dataset.defaults = Object.values(defaults).join();
  for (const name of Object.keys(given)) if (!names.includes(name)) delete given[name];
  box.replaceChildren(...names.map((name) => field(name, defaults[name], given[name], (value) => {
    if (value === "") delete given[name];
    else given[name] = value;
    later();
  })));
}

const VIEWS = {
  drawing() {},
  async explore(mine) {
    const { page, error } = await ask({ do: "explore" });
    if (error) tell(new Error(error));
    else if (mine === round) $("explore").firstElementChild.srcdoc = page;
  },
  async memory(mine) {
    const { facts, error } = await ask({ do: "compare" });
    if (mine !== round) return;
    if (!facts) return tell(new Error(error));
    const slider = $("slider");
    slider.max = Math.ceil(Math.max(...facts.schedules.map(({ memory }) => memory ?? 0)));
    slider.value = state.memory || slider.max;
    const table = () => {
      $("cap").value = slider.value;
      $("table").replaceChildren(comparison(facts, Number(slider.value), choose));
    };
    slider.oninput = () => {
      state.memory = Number(slider.value);
      table();
    };
    table();
  },
  async formulas(mine) {
    $("formulas").firstElementChild.textContent = "deriving the formulas";
    const { text } = await ask({ do: "report" });
    if (mine === round) $("formulas").firstElementChild.textContent = text;
  },
};

async function layOut(mine) {
  const { text } = await ask({ do: "layout" });
  if (mine !== round) return;
  $("laid").hidden = false;
  $("laid").textContent = text;
}

function choose(name) {
  take({ name, text: library.get(name), form: "sched", schedule: "", sizes: {} });
}

function take(changes) {
  Object.assign(state, changes);
  editor.text = state.text;
  $("library").value = state.name;
  draw();
}

function view(name) {
  state.view = name;
  for (const tab of $("views").children) tab.ariaSelected = String(tab.dataset.view === name);
  for (const each of document.querySelectorAll(".view")) each.hidden = each.id !== name;
}

async function write(target) {
  const { text, error } = target === "svg" ? { text: $("drawing").innerHTML } : await ask({ do: "export", to: target });
  if (error) return $("findings").replaceChildren(findingRow({ code: "", message: error }));
  const suffix = { csv: "csv", json: "json", svg: "svg" }[target] ?? "txt";
  const file = Object.assign(document.createElement("a"), {
    href: URL.createObjectURL(new Blob([text])),
    download: `${state.name || "mine"}.${suffix}`,
  });
  file.click();
  URL.revokeObjectURL(file.href);
}

$("library").onchange = ({ target }) => (target.value ? choose(target.value) : take({ name: "" }));
$("schedules").onchange = ({ target }) => take({ schedule: target.value, sizes: {} });
$("open").onclick = () => $("file").click();
$("file").onchange = async ({ target }) => {
  const [file] = target.files;
  if (file) take({ name: "", text: await file.text(), form: file.name.endsWith(".csv") ? "csv" : "sched", schedule: "", sizes: {} });
  target.value = "";
};
$("format").onclick = async () => take({ name: "", ...(state.form === "sched" ? await ask({ do: "format" }) : {}) });
$("export").onchange = ({ target }) => {
  if (target.value) write(target.value).catch(tell);
  target.value = "";
};
$("link").onclick = async () => {
  await navigator.clipboard.writeText(location.href);
  $("state").textContent = "link copied";
};
$("layout").oninput = ({ target }) => {
  state.layout = target.value;
  $("laid").hidden = !state.layout;
  later();
};
$("views").onclick = ({ target }) => {
  if (!target.dataset.view) return;
  view(target.dataset.view);
  draw();
};
$("fields").onsubmit = (event) => event.preventDefault();

async function begin() {
  Object.assign(state, await unpacked(location.hash.slice(1)));
  view(state.view);
  $("layout").value = state.layout;
  const { library: entries, words } = await compiler.ask({ do: "open" });
  library = new Map(entries.map(({ name, text }) => [name, text]));
  $("library").append(...library.keys().map((name) => new Option(name, name)));
  editor.speak(words);
  take({ text: state.name ? (library.get(state.name) ?? "") : state.text });
}

begin().catch(tell);
globalThis.playground = { ask }; // for the console of the browser
if (location.protocol !== "file:") navigator.serviceWorker?.register("offline.js").catch(tell);
