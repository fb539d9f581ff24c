// Makes the small parts of the page out of what the compiler answers.
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const number = (value) => String(Number(value.toPrecision(4)));
const percent = (value) => `${(100 * value).toFixed(1)} %`;

// A field with a name; its default is shown while it is empty.
export function field(name, usual, value, changed) {
  const input = element("input", {
    value: value ?? "", placeholder: usual ?? "", inputMode: "decimal", name, autocomplete: "off",
  });
  input.oninput = () => changed(input.value.trim());
  return element("label", {}, element("span", { textContent: name }), input);
}

// One line of `schedc check --json`.
export function figures(facts) {
  const peak = Math.max(...facts.peak_memory);
  return (
    `${facts.ranks} ranks, ${facts.stages} stages, ${facts.microbatches} microbatches, ${facts.ops} ops. ` +
    `Step ${number(facts.makespan)}, bubble ${number(Math.max(...facts.bubble))} ` +
    `(${percent(facts.bubble_ratio)}), peak memory ${number(peak)}.`
  );
}

export function claimRow({ claim, condition, applies, holds, status }) {
  const word = applies ? status : "does not apply here";
  return element(
    "li",
    { className: holds ? "holds" : "fails" },
    element("b", { textContent: word }),
    ` ${claim}${condition ? ` when ${condition}` : ""}`,
  );
}

export function findingRow({ code, message, line, column, help }, go) {
  const place = line ? `${line}:${column} ` : "";
  const text = `${place}${code ? `${code}: ` : ""}${message}`;
  const row = element("li", {}, go && line ? element("button", { textContent: text, onclick: go }) : text);
  if (help) row.append(element("small", { textContent: help }));
  return row;
}

// The schedules that fit into a memory, best first. facts: the object of `schedc compare --json`.
export function comparison(facts, memory, choose) {
  const rows = facts.schedules;
  const fitting = rows.filter((row) => !row.refused && row.memory <= memory).sort((one, other) => one.bubble - other.bubble);
  const head = element("tr", {}, ...["schedule", "bubble", "memory", "needs"].map((textContent) => element("th", { textContent })));
  const body = fitting.map((row) => {
    const own = row.schedule.includes(".");
    const name = own ? "this text" : element("button", { textContent: row.schedule, onclick: () => choose(row.schedule) });
    const cells = [number(row.bubble), number(row.memory), row.needs.join(", ")];
    return element("tr", { className: own ? "own" : "" }, element("td", {}, name), ...cells.map((textContent) => element("td", { textContent })));
  });
  const left = rows.filter((row) => row.refused).map((row) => row.schedule);
  const sizes = `Microbatches on one rank, at P = ${facts.ranks}, M = ${facts.microbatches}.`;
  const note = element("caption", { textContent: left.length ? `${sizes} Not at these sizes: ${left.join(", ")}` : sizes });
  return element("table", {}, note, element("thead", {}, head), element("tbody", {}, ...body));
}
