// What all pages share: their data, elements, lines of text and the tooltip.
const page = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function make(name, text = "", parent = null) {
  const element = document.createElement(name);
  if (text !== "") element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

// What a zlib stream in base64 holds.
async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fillLines(element, lines) {
  element.replaceChildren();
  for (const line of lines) make("div", line, element);
}

function showTip(lines, x, y) {
  const tip = byId("tip");
  tip.hidden = !lines;
  if (!lines) return;
  fillLines(tip, lines);
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${x + 16 + width > innerWidth ? Math.max(4, x - width - 12) : x + 16}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18}px`;
}
