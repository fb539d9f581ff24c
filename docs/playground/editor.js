// The text of the page: CodeMirror with the words of the language, and completions and findings of the compiler.
import { autocompletion } from "@codemirror/autocomplete";
import { HighlightStyle, StreamLanguage, syntaxHighlighting } from "@codemirror/language";
import { setDiagnostics } from "@codemirror/lint";
import { Compartment, StateEffect, StateField } from "@codemirror/state";
import { Decoration, EditorView } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import { basicSetup } from "codemirror";

const KINDS = { keyword: "keyword", name: "variable", op: "enum", line: "property", schedule: "class" };
const HIGHLIGHT = HighlightStyle.define([
  { tag: tags.comment, class: "w-comment" },
  { tag: tags.keyword, class: "w-keyword" },
  { tag: tags.atom, class: "w-op" },
  { tag: tags.number, class: "w-number" },
  { tag: tags.string, class: "w-string" },
  { tag: tags.standard(tags.variableName), class: "w-builtin" },
]);

function language(words) {
  const known = new Map();
  for (const each of words.keyword) known.set(each, "keyword");
  for (const each of words.builtin) known.set(each, "variableName.standard");
  const op = new RegExp(`^[${words.op.join("")}][0-9]*$`);
  return StreamLanguage.define({
    token(stream) {
      if (stream.eatSpace()) return null;
      if (stream.match(/#.*/)) return "comment";
      if (stream.match(/"[^"]*"/)) return "string";
      if (stream.match(/[0-9]+(\.[0-9]+)?/)) return "number";
      const word = stream.match(/\w+/);
      if (!word) return stream.next() && null;
      return op.test(word[0]) ? "atom" : (known.get(word[0]) ?? null);
    },
    languageData: { commentTokens: { line: "#" } },
  });
}

const recolour = StateEffect.define();
const coloured = StateField.define({
  create: () => Decoration.none,
  update(marks, transaction) {
    for (const effect of transaction.effects) if (effect.is(recolour)) return effect.value;
    return marks.map(transaction.changes);
  },
  provide: (field) => EditorView.decorations.from(field),
});

// The offset of a line and a column from 1. Columns count characters, the editor counts UTF-16 units.
function offset(doc, line, column) {
  const at = doc.line(Math.min(Math.max(line, 1), doc.lines));
  return at.from + Math.min([...at.text].slice(0, column - 1).join("").length, at.length);
}

export class Editor {
  // changed(): called after each change by hand. ask(request): asks the compiler about the text.
  constructor(parent, changed, ask) {
    this.ask = ask;
    this.language = new Compartment();
    this.view = new EditorView({
      parent,
      extensions: [
        basicSetup,
        this.language.of([]),
        syntaxHighlighting(HIGHLIGHT),
        coloured,
        autocompletion({ override: [(context) => this.#completions(context)] }),
        EditorView.contentAttributes.of({ "aria-label": "text of the schedule" }),
        EditorView.updateListener.of((update) => update.docChanged && !this.silent && changed()),
      ],
    });
  }

  speak(words) {
    this.view.dispatch({ effects: this.language.reconfigure(language(words)) });
  }

  get text() {
    return this.view.state.doc.toString();
  }

  set text(text) {
    if (text === this.text) return;
    this.silent = true;
    this.view.dispatch({ changes: { from: 0, to: this.view.state.doc.length, insert: text } });
    this.silent = false;
  }

  async #completions(context) {
    const word = context.matchBefore(/[A-Za-z0-9_.]*/);
    if (!context.explicit && word.from === word.to) return null;
    const line = context.state.doc.lineAt(context.pos);
    const column = [...line.text.slice(0, context.pos - line.from)].length + 1;
    const { words } = await this.ask({ do: "complete", line: line.number, column });
    const options = words.map(({ word, kind, detail }) => ({ label: word, type: KINDS[kind], info: detail || undefined }));
    return { from: word.from, options, validFor: /^[A-Za-z0-9_]*$/ };
  }

  // diagnostics: those of `schedc check --json`.
  find(diagnostics) {
    const { doc } = this.view.state;
    const found = diagnostics
      .filter(({ line }) => line)
      .map((each) => {
        const from = offset(doc, each.line, each.column);
        const to = Math.max(from, offset(doc, each.end_line, each.end_column));
        return { from, to, severity: "error", message: `${each.code}: ${each.message}` };
      });
    this.view.dispatch(setDiagnostics(this.view.state, found));
  }

  // tokens: [line, column, end column, type].
  colour(tokens) {
    const { doc } = this.view.state;
    const marks = tokens.map(([line, column, end, type]) =>
      Decoration.mark({ class: `t-${type}` }).range(offset(doc, line, column), offset(doc, line, end)),
    );
    this.view.dispatch({ effects: recolour.of(Decoration.set(marks.filter((mark) => mark.from < mark.to), true)) });
  }

  go(line, column) {
    const anchor = offset(this.view.state.doc, line, column);
    this.view.dispatch({ selection: { anchor }, scrollIntoView: true });
    this.view.focus();
  }
}
