// Makes the archives of the page with the Python that opens them: `node pack.mjs FOLDER SCRATCH`.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, scratch] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide/pyodide.mjs`).href);
const python = await loadPyodide({ indexURL: `${folder}/pyodide/` });
python.mountNodeFS("/page", folder);
python.mountNodeFS("/scratch", scratch);
python.runPython(readFileSync(new URL("pack.py", import.meta.url), "utf-8"));
