// Audits the open page: how far it is wider than the window, and texts whose contrast with what is behind them is low.
(least) => {
  const parts = (colour) => {
    const numbers = colour.match(/-?[\d.]+(e-?\d+)?/g).map(Number);
    const scale = colour.startsWith("color(") ? 255 : 1;
    const [red, green, blue, alpha = 1] = numbers;
    return [red * scale, green * scale, blue * scale, alpha];
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, two) => {
    const [low, high] = [light(one), light(two)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const dark = getComputedStyle(document.documentElement).colorScheme.includes("dark")
    && matchMedia("(prefers-color-scheme: dark)").matches;
  const canvas = dark ? [18, 18, 18, 1] : [255, 255, 255, 1];

  const grounds = new Map();
  const ground = (element) => {
    if (!element) return canvas;
    if (!grounds.has(element)) {
      const own = parts(getComputedStyle(element).backgroundColor);
      grounds.set(element, own[3] >= 1 ? own : over(own, ground(element.parentElement)));
    }
    return grounds.get(element);
  };
  // What a text of a drawing lies on: the last shape before it that holds its middle.
  const shapes = new Map();
  const shapesOf = (drawing) => {
    if (!shapes.has(drawing)) {
      const filled = [...drawing.querySelectorAll("rect, path, circle, polygon")].filter((each) =>
        !each.closest("defs") && each.checkVisibility() && /^(rgb|color)/.test(getComputedStyle(each).fill));
      shapes.set(drawing, filled.map((each) => [each, each.getBoundingClientRect()]));
    }
    return shapes.get(drawing);
  };
  const behind = (text) => {
    const box = text.getBoundingClientRect();
    const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
    const last = shapesOf(text.ownerSVGElement).findLast(([shape, { left, right, top, bottom }]) =>
      left <= x && x <= right && top <= y && y <= bottom
      && shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING);
    return last && over(parts(getComputedStyle(last[0]).fill), ground(text.ownerSVGElement.parentElement));
  };
  const shade = (element) => {
    let alpha = 1;
    for (let each = element; each; each = each.parentElement) alpha *= Number(getComputedStyle(each).opacity);
    return alpha;
  };

  const low = new Map();
  const walker = document.createTreeWalker(document.body ?? document.documentElement, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || ["SCRIPT", "STYLE", "NOSCRIPT", "TITLE", "OPTION"].includes(element.tagName.toUpperCase())) continue;
    if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const style = getComputedStyle(element);
    const drawn = element instanceof SVGElement;
    const under = (drawn && behind(element)) || ground(element);
    const [red, green, blue, alpha] = parts(drawn ? style.fill : style.color);
    const ratio = contrast(over([red, green, blue, alpha * shade(element)], under), under);
    if (ratio < least) {
      const name = element.tagName.toLowerCase() + [...element.classList].map((each) => "." + each).join("");
      if (!low.has(name)) low.set(name, `${name} ${ratio.toFixed(2)}: ${node.data.trim().slice(0, 40)}`);
    }
  }
  const root = document.documentElement;
  const wide = root.scrollWidth - root.clientWidth;
  const widest = [];
  if (wide > 0) {
    for (const each of document.body.querySelectorAll("*")) {
      if (each.getBoundingClientRect().right > root.clientWidth + 1) widest.push(each.tagName.toLowerCase() + "." + each.className);
    }
  }
  return {wide, widest: widest.slice(0, 5), low: [...low.values()]};
}
