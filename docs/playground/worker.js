// Runs the compiler in a worker of the browser: Pyodide with numpy, and the packages of this commit.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const HOME = "/lib/python3.12/site-packages";
const FIRST = new Set(["open", "draw", "colour"]);
let python;
let answer;

async function bytes(file) {
  const response = await fetch(file);
  if (!response.ok) throw new Error(`${file}: ${response.status}`);
  return response.arrayBuffer();
}

function unpack(archive) {
  python.unpackArchive(archive, "zip", { extractDir: HOME });
}

async function start() {
  const first = bytes("first.zip");
  python = await loadPyodide({ indexURL: "./pyodide/" });
  unpack(await first);
  python.pyimport("playground.later").find_later(() => unpack(later ?? bytesAtOnce("later.zip")));
  answer = python.runPython("from playground.answers import answer; answer");
}

// The modules that a first drawing does not need. An import cannot wait for a promise.
let later;

function bytesAtOnce(file) {
  const request = new XMLHttpRequest();
  request.open("GET", file, false);
  request.responseType = "arraybuffer";
  request.send();
  return request.response;
}

async function loadLater() {
  later ??= await bytes("later.zip");
}

let formulas;

// sympy is large and only `report` needs it.
function loadFormulas() {
  formulas ??= bytes("formulas.zip").then(unpack);
  return formulas;
}

const started = start();
started.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: String(error) }),
);

onmessage = async ({ data: { number, request } }) => {
  try {
    await started;
    if (!FIRST.has(request.do)) await loadLater();
    if (request.do === "report") await loadFormulas();
    postMessage({ begun: number });
    postMessage({ number, result: JSON.parse(answer(JSON.stringify(request))) });
  } catch (error) {
    postMessage({ number, error: String(error) });
  }
};
