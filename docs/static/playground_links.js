// Adds links to the playground, which lies beside the site: one in the navigation, one at each block that it can open.
const HOME = new URL("../playground/", import.meta.url);
const { packed } = await import(new URL("link.js", HOME));

function link(text, state) {
  const made = document.createElement("a");
  made.textContent = text;
  made.className = "playground-link";
  made.href = HOME;
  if (state) packed(state).then((address) => (made.href = `${HOME}#${address}`));
  return made;
}

// A whole schedule; its edition may be missing.
function ofText(text) {
  if (!/^\s*schedule\s/m.test(text)) return null;
  return { name: "", text: /^\s*sched 1/m.test(text) ? text : `sched 1\n\n${text}` };
}

// A command about one schedule of the library: its name, sizes and costs.
function ofCommand(text) {
  const found = text.match(/^\$? ?schedc (?:check|show|compile|report) (\w+)((?: +-D +\w+=\d+| +--cost +\w+=[\d.]+)*)\s*$/m);
  if (!found) return null;
  const given = (option) => Object.fromEntries(
    [...found[2].matchAll(new RegExp(`${option} +(\\w+)=([\\d.]+)`, "g"))].map(([, name, value]) => [name, value]),
  );
  return { name: found[1], text: "", sizes: given("-D"), costs: given("--cost") };
}

for (const [kind, read] of [["sched", ofText], ["console", ofCommand]]) {
  for (const block of document.querySelectorAll(`.highlight-${kind}`)) {
    const state = read(block.textContent);
    if (state) block.append(link("open in the playground", state));
  }
}
const tree = document.querySelector(".sidebar-tree ul");
if (tree) {
  const row = document.createElement("li");
  row.className = "toctree-l1";
  row.append(Object.assign(link("Playground"), { className: "reference internal" }));
  tree.prepend(row);
}
