// Asks the compiler in its worker, and interrupts it where an answer takes longer than ten seconds.
const LIMIT = 10_000;

export class Compiler {
  // told(text): tells the state of the worker; empty once it is ready.
  constructor(told) {
    this.told = told;
    this.waiting = new Map();
    this.number = 0;
    this.#begin("loading the compiler");
  }

  #begin(text) {
    this.told(text);
    this.worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data }) => this.#hear(data);
    this.worker.onerror = (event) => this.told(`the compiler does not load: ${event.message}`);
  }

  #hear({ ready, failed, begun, number, result, error }) {
    if (ready) this.told("");
    if (failed) this.told(`the compiler does not load: ${failed}`);
    const asked = this.waiting.get(begun ?? number);
    if (!asked) return;
    if (begun !== undefined) {
      asked.timer = setTimeout(() => this.#interrupt(), LIMIT);
      return;
    }
    clearTimeout(asked.timer);
    this.waiting.delete(number);
    if (error) asked.reject(new Error(error));
    else asked.resolve(result);
  }

  #interrupt() {
    this.worker.terminate();
    const left = [...this.waiting.values()];
    this.waiting.clear();
    this.#begin("starting the compiler again");
    for (const { reject, timer } of left) {
      clearTimeout(timer);
      reject(new Error("interrupted after ten seconds: an installed schedc has no such limit"));
    }
  }

  ask(request) {
    return new Promise((resolve, reject) => {
      this.number += 1;
      this.waiting.set(this.number, { resolve, reject });
      this.worker.postMessage({ number: this.number, request });
    });
  }
}
