// Runs the compiler in a worker of the browser: Pyodide with numpy, and the packages of this commit.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const HOME = "/lib/python3.12/site-packages";
let python;
let answer;

async function bytes(file) {
  const response = await fetch(file);
  if (!response.ok) throw new Error(`${file}: ${response.status}`);
  return response.arrayBuffer();
}

async function start() {
  const archives = Promise.all(["numpy.zip", "packages.zip"].map(bytes));
  python = await loadPyodide({ indexURL: "./pyodide/" });
  for (const archive of await archives) python.unpackArchive(archive, "zip", { extractDir: HOME });
  answer = python.runPython("from playground.answers import answer; answer");
}

let formulas;

// sympy is large and only `report` needs it.
function loadFormulas() {
  formulas ??= bytes("formulas.zip").then((archive) => python.unpackArchive(archive, "zip", { extractDir: HOME }));
  return formulas;
}

const started = start().then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: String(error) }),
);

onmessage = async ({ data: { number, request } }) => {
  await started;
  try {
    if (request.do === "report") await loadFormulas();
    postMessage({ begun: number });
    postMessage({ number, result: JSON.parse(answer(JSON.stringify(request))) });
  } catch (error) {
    postMessage({ number, error: String(error) });
  }
};
