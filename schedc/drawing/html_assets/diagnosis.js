// Tables of causes, of the bubble and of questions, with a bar for each share. All text is set as text.
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const between = (interval) => (interval ? `${percent(interval[0])} to ${percent(interval[1])}` : "one step");

const WORDS = ["cause", "measured", "class", "question", "by what"];

function head(table, titles) {
  const row = make("tr", "", make("thead", "", table));
  for (const title of titles) make("th", title, row).className = WORDS.includes(title) ? "words" : "number";
  return make("tbody", "", table);
}

function bar(row, share, most, kind) {
  const cell = make("td", "", row);
  cell.className = "bar";
  const mark = make("div", "", cell);
  mark.className = kind;
  mark.style.width = `${Math.max(0, Math.min(100, (100 * share) / most))}%`;
}

function words(row, text) {
  make("td", text, row).className = "words";
}

byId("title").textContent = page.title;
for (const [name, value] of page.facts) {
  const pair = make("div", "", byId("facts"));
  make("dt", name, pair);
  make("dd", value, pair);
}
const most = Math.max(0.001, page.unexplained, ...page.causes.map((cause) => cause.gain));
byId("none").hidden = !page.note;
byId("none").textContent = page.note;
byId("bubbles").hidden = Boolean(page.note);
if (!page.note) {
  const causes = head(byId("causes"), ["gain", "", "alone", "95 %", "cause", "measured"]);
  for (const cause of page.causes) {
    const row = make("tr", "", causes);
    make("td", percent(cause.gain), row);
    bar(row, cause.gain, most, "cause");
    make("td", percent(cause.alone), row);
    make("td", between(cause.interval), row);
    words(row, cause.what);
    words(row, cause.why);
  }
  const left = make("tr", "", causes);
  left.className = "left";
  make("td", percent(page.unexplained), left);
  bar(left, page.unexplained, most, "bubble");
  make("td", "", left);
  make("td", "", left);
  words(left, "unexplained");
  words(left, "");
  const bubble = head(byId("bubble"), ["share", "", "class"]);
  const widest = Math.max(0.001, ...Object.values(page.bubble));
  for (const [name, share] of Object.entries(page.bubble)) {
    const row = make("tr", "", bubble);
    make("td", percent(share), row);
    bar(row, share, widest, "bubble");
    words(row, name);
  }
}
byId("asked").hidden = !page.what_if.length;
const questions = head(byId("questions"), ["less", "95 %", "question", "by what"]);
for (const answer of page.what_if) {
  const row = make("tr", "", questions);
  make("td", percent(answer.gain), row);
  make("td", answer.interval ? between(answer.interval) : "", row);
  words(row, answer.question);
  words(row, answer.note);
}
