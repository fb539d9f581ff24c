// Plots with two axes: round values along each, their units, and the part of them that is seen.
const PLOT = { width: 640, height: 400, left: 62, right: 16, top: 24, bottom: 44 };
const SPACE = "http://www.w3.org/2000/svg";
const MOST_ZOOM = 1000;

function draw(name, attributes, parent, text = "") {
  const element = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  parent.append(element);
  return element;
}

const shortest = (value) => String(Number(value.toPrecision(6)));

// An axis from `first` to `last`, which lie at px `from` and `to`. byFactors: equal factors are as far apart.
function makeAxis(first, last, from, to, byFactors = false) {
  const place = byFactors ? Math.log : (value) => value;
  const whole = [place(first), place(last)];
  const axis = { seen: [...whole] };
  axis.at = (value) => from + ((place(value) - axis.seen[0]) / (axis.seen[1] - axis.seen[0])) * (to - from);
  axis.has = (value) => place(value) >= axis.seen[0] && place(value) <= axis.seen[1];
  axis.zoom = (factor, px) => {
    const [low, high] = axis.seen;
    const middle = low + ((px - from) / (to - from)) * (high - low);
    const most = whole[1] - whole[0];
    const length = Math.min(Math.max((high - low) / factor, most / MOST_ZOOM), most);
    const start = middle - ((middle - low) / (high - low)) * length;
    axis.seen[0] = Math.min(Math.max(start, whole[0]), whole[1] - length);
    axis.seen[1] = axis.seen[0] + length;
  };
  axis.reset = () => (axis.seen = [...whole]);
  axis.ticks = (apart) => {
    const ends = byFactors ? axis.seen.map(Math.exp) : axis.seen;
    const far = byFactors && ends[1] > 8 * ends[0];
    const values = far ? tenths(...ends) : roundValues(...ends, (apart * (ends[1] - ends[0])) / Math.abs(to - from));
    const kept = [];
    for (const value of values) {
      if (!kept.length || Math.abs(axis.at(value) - axis.at(kept.at(-1))) >= apart) kept.push(value);
    }
    return kept;
  };
  return axis;
}

// 1, 2 and 5 times powers of ten within two ends.
function tenths(first, last) {
  const values = [];
  for (let power = Math.floor(Math.log10(first)); 10 ** power <= last; power++) {
    for (const value of [1, 2, 5]) values.push(value * 10 ** power);
  }
  return values.filter((value) => value >= first && value <= last);
}

// Multiples of 1, 2 or 5 times a power of ten within two ends, at least so far apart.
function roundValues(first, last, least) {
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((m) => m * power).find((each) => each >= least * (1 - 1e-12));
  const values = [];
  for (let i = Math.ceil(first / step); i * step <= last; i++) values.push(i * step);
  return values;
}

// The two ends of values, with room beside them.
function withRoom(values, least = -Infinity) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = 0.08 * (high - low) || 0.08 * Math.abs(high) || 1;
  return [Math.max(least, low - room), high + room];
}

// Grid, values and titles of both axes; returns the part of the picture that cuts what is outside of them.
function drawFrame(svg, x, y, titles) {
  const { width, height, left, right, top, bottom } = PLOT;
  svg.replaceChildren();
  for (const value of x.ticks(64)) {
    const at = x.at(value);
    draw("line", { x1: at, x2: at, y1: top, y2: height - bottom, class: "grid" }, svg);
    draw("text", { x: at, y: height - bottom + 16, class: "tick", "text-anchor": "middle" }, svg, shortest(value));
  }
  for (const value of y.ticks(36)) {
    const at = y.at(value);
    draw("line", { x1: left, x2: width - right, y1: at, y2: at, class: "grid" }, svg);
    draw("text", { x: left - 6, y: at + 4, class: "tick", "text-anchor": "end" }, svg, shortest(value));
  }
  const middle = (left + width - right) / 2;
  draw("text", { x: middle, y: height - 8, class: "tick", "text-anchor": "middle" }, svg, titles[0]);
  draw("text", { x: 4, y: 12, class: "tick" }, svg, titles[1]);
  const inside = { x: left, y: top, width: width - left - right, height: height - top - bottom };
  return draw("svg", { ...inside, viewBox: `${left} ${top} ${inside.width} ${inside.height}` }, svg);
}

// Makes a plot zoom: by the wheel around the pointer, by its buttons and keys around `middle()`, a place in px.
function zooming(svg, buttons, axes, middle, redraw) {
  const zoom = (factor, [px, py]) => {
    axes().x.zoom(factor, px);
    axes().y.zoom(factor, py);
    redraw();
  };
  const reset = () => {
    axes().x.reset();
    axes().y.reset();
    redraw();
  };
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    const place = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    zoom(Math.exp(-0.0016 * event.deltaY), [place[0] * PLOT.width, place[1] * PLOT.height]);
  }, { passive: false });
  const actions = { "+": () => zoom(1.5, middle()), "−": () => zoom(1 / 1.5, middle()), "whole plot": reset };
  for (const [word, action] of Object.entries(actions)) {
    const button = make("button", word, buttons);
    button.type = "button";
    button.ariaLabel = { "+": "zoom in", "−": "zoom out" }[word] ?? null;
    button.addEventListener("click", action);
  }
  return { "+": actions["+"], "-": actions["−"], 0: reset };
}
