// The extension: starts `schedc lsp`, and keeps a drawing beside the text.
"use strict";

const vscode = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

const DELAY = 300; // milliseconds without a key, after which the drawing follows
const MISSING = "No `schedc lsp` starts. Run `pip install 'schedc[lsp]'`, or set `schedc.python` or `schedc.path`.";

let client = null;
const previews = new Map(); // by the address of a text, its panel
const timers = new Map();

/** The command of the server: by the settings, by the interpreter of the Python extension, or by PATH. */
async function serverCommand() {
  const settings = vscode.workspace.getConfiguration("schedc");
  if (settings.get("path")) return { command: settings.get("path"), args: ["lsp"] };
  const python = settings.get("python") || (await interpreter());
  return python ? { command: python, args: ["-m", "schedc", "lsp"] } : { command: "schedc", args: ["lsp"] };
}

/** The interpreter that the Python extension has chosen; empty without that extension. */
async function interpreter() {
  const extension = vscode.extensions.getExtension("ms-python.python");
  if (!extension) return "";
  const api = await extension.activate();
  return api?.environments?.getActiveEnvironmentPath()?.path ?? "";
}

async function start() {
  const options = { documentSelector: [{ language: "sched" }] };
  client = new LanguageClient("schedc", "schedc", await serverCommand(), options);
  try {
    await client.start();
  } catch {
    client = null;
    vscode.window.showErrorMessage(MISSING);
  }
}

async function restart() {
  if (client) await client.stop();
  await start();
}

/** Opens the drawing of the active text beside it. */
async function preview() {
  const document = vscode.window.activeTextEditor?.document;
  if (document?.languageId !== "sched") return;
  const key = document.uri.toString();
  if (!previews.has(key)) {
    const title = `Drawing of ${document.uri.path.split("/").pop()}`;
    const beside = { viewColumn: vscode.ViewColumn.Beside, preserveFocus: true };
    const panel = vscode.window.createWebviewPanel("schedc.preview", title, beside, { enableScripts: true });
    panel.onDidDispose(() => previews.delete(key));
    previews.set(key, panel);
  }
  await draw(document);
}

/** Brings the drawing of a text up to date. While the text has findings, the last drawing stays. */
async function draw(document) {
  const panel = previews.get(document.uri.toString());
  if (!panel || !client) return;
  const answer = await client.sendRequest("schedc/preview", { uri: document.uri.toString() });
  if (answer.html) panel.webview.html = answer.html;
  panel.title = panel.title.replace(/ \(old\)$/, "") + (answer.html ? "" : " (old)");
}

function changed(event) {
  const key = event.document.uri.toString();
  if (!previews.has(key)) return;
  clearTimeout(timers.get(key));
  timers.set(key, setTimeout(() => draw(event.document), DELAY));
}

async function activate(context) {
  context.subscriptions.push(
    vscode.commands.registerCommand("schedc.preview", preview),
    vscode.commands.registerCommand("schedc.restart", restart),
    vscode.workspace.onDidChangeTextDocument(changed),
  );
  await start();
}

async function deactivate() {
  if (client) await client.stop();
}

module.exports = { activate, deactivate };
