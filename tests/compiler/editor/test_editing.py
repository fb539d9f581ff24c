"""What editors and shells get: completion, highlighting, and the language server over stdio."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete

from schedc.cli import main
from schedc.codes import CODES
from schedc.editor.findings import findings
from schedc.editor.hints import hints
from schedc.editor.hover import WORDS, hover_code
from schedc.editor.sizes import editor_sizes
from schedc.editor.textmate import keywords, textmate_grammar
from schedc.load.library import load, names
from schedc.source import Source
from schedc.step.costs.keys import COST_SYMBOLS
from schedc.syntax.parser import parse
from schedc.syntax.plan_words import FORMS, PLAN_LINES
from schedc.syntax.words import BUILTINS, METRICS, OP_LETTERS, ORDER_WORDS, PLACEMENTS, ROLES
from support.language_client import LanguageClient
from support.needs import needed
from support.paths import ROOT

LIBRARY = sorted((ROOT / "schedules").glob("*.sched"))


# Completion.


def completions(*words: str) -> list[str]:
    shell = ShellComplete(main, {}, "schedc", "_SCHEDC_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1]) if item.type == "plain"]


def test_the_shell_completes_schedules_sizes_and_targets() -> None:
    assert completions("check", "") == names()
    assert completions("show", "dualpipev") == [name for name in names() if name.startswith("dualpipev")]
    assert completions("check", "interleaved_1f1b", "-D", "") == ["P=4", "M=8", "v=2"]
    assert completions("check", "interleaved_1f1b", "-D", "v") == ["v=2"]
    assert completions("check", "-D", "") == []
    assert completions("check", "no_such_schedule", "-D", "") == []
    assert completions("export", "1f1b", "--to", "csv") == ["csv", "csv-lowered"]


def test_the_shell_completes_models_clusters_and_restrictions() -> None:
    assert completions("plan", "gpt-") == ["gpt-oss-120b", "gpt-oss-20b"]
    assert completions("plan", "gpt2", "h") == ["h100", "h20", "h200", "h800"]
    assert "megatron" in completions("plan", "gpt2", "h100", "--restrict", "")
    assert completions("explain", "s00") == [code for code in CODES if code.startswith("S00")] != []
    assert {"schedc.check", "schedc.check.files"} <= set(completions("schema", "schedc.check"))


# Highlighting.


def grammar_words() -> set[str]:
    """The words that the parser itself knows."""
    from schedc.syntax.parser import grammar

    patterns = [terminal.pattern.value for terminal in grammar()[0].terminals]
    return {pattern for pattern in patterns if re.fullmatch("[a-z]+", pattern)}


def test_both_highlighters_know_the_words_of_the_grammar() -> None:
    assert set(keywords()) == grammar_words() | {"if"}
    path = ROOT / "editors" / "vscode" / "syntaxes" / "sched.tmLanguage.json"
    assert path.read_text(encoding="utf-8") == textmate_grammar(), (
        f"run python -m schedc.editor.textmate > {path.relative_to(ROOT)}"
    )
    rules = json.loads(path.read_text())["patterns"]
    by_name = {rule.get("name"): set(re.findall(r"\w+", rule["match"].replace(r"\b", ""))) for rule in rules}
    assert by_name["keyword.control.sched"] == set(keywords())
    assert by_name["storage.type.sched"] == {*ROLES, *PLACEMENTS}
    assert by_name["support.function.sched"] == {*BUILTINS, *METRICS}
    assert by_name["keyword.other.sched"] >= set(PLAN_LINES)
    assert all(re.compile(rule["match"]) for rule in rules)


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_pygments_leaves_nothing_of_the_library_unknown(path: Path) -> None:
    pygments = needed("pygments")
    from pygments.lexers import get_lexer_for_filename
    from pygments.token import Error, Keyword, Name

    from schedc.editor.highlight import SchedLexer

    text = path.read_text(encoding="utf-8")
    tokens = list(pygments.lex(text, SchedLexer()))
    assert not [value for kind, value in tokens if kind is Error]
    assert "".join(value for _, value in tokens) == text
    assert (Name.Function, path.stem) in tokens
    assert (Keyword, "rank") in tokens
    planned = list(pygments.lex("plan a = x {\n  hot 3  cell F & B { comm F.dispatch }\n}", SchedLexer()))
    assert {(Keyword, "hot"), (Keyword, "cell"), (Name.Builtin.Pseudo, "F.dispatch")} <= set(planned)
    assert get_lexer_for_filename


# Hover and diagnostics.

TEXT = """sched 1
## What it is.
schedule mine(P: ranks = 2, M: microbatches = 4) {
  place v
  let some = M // 2
  rank r { let all = 2*some phase x repeat all { F0  F1  B1  B0 } }
  expect peak_activations == P
}
"""


def test_every_word_of_the_language_is_explained() -> None:
    assert (
        set(WORDS) == {*ROLES, *PLACEMENTS, *BUILTINS, *METRICS, *COST_SYMBOLS, *PLAN_LINES, *ORDER_WORDS} - OP_LETTERS
    )


@pytest.mark.parametrize(
    ("line", "column", "said"),
    [
        (3, 10, "What it is.\n\nP = 2, M = 4: makespan "),
        (3, 15, "`P`: size: the number of ranks, P, 2 by default"),
        (4, 9, "placement: rank r holds stage r"),
        (5, 8, "let some = M // 2"),
        (6, 47, "let all = 2*some"),
        (6, 55, "`F1`: forward of chunk 1\n\nrank 0: stage 3, rank 1: stage 2"),
        (7, 10, "metric: the most activations"),
    ],
)
def test_hover(line: int, column: int, said: str) -> None:
    found = hover_code(Source("mine.sched", TEXT), line, column)
    assert found is not None
    assert said in found[0]
    assert found[1].line == line
    assert found[1].column <= column <= found[1].end_column


def test_hover_explains_words_of_computed_orders_but_no_name_of_a_phase() -> None:
    head = "schedule a(P: ranks = 1, M: microbatches = 1) { place linear rank r {"
    text = f"{head}\nphase pair timed pair fill W {{ F at 0 }} }} }}"
    source = Source("mine.sched", text)
    assert hover_code(source, 2, 8) is None
    for column, said in (
        (13, "order of their slots"),
        (19, "overlapped pair"),
        (24, "every W runs"),
        (35, "slot of an op"),
    ):
        found = hover_code(source, 2, column)
        assert found is not None, column
        assert said in found[0]


def test_hover_shows_how_a_line_of_a_plan_is_written() -> None:
    found = hover_code(Source("mine.sched", "plan a = 1f1b {\n  layers 4\n  recompute full\n}\n"), 3, 5)
    assert found is not None
    assert found[0].startswith(f"`recompute`: line of a plan, `{FORMS['recompute']}`: what backward works out again")


def test_hover_has_nothing_to_say_about_white_space_and_comments() -> None:
    source = Source("mine.sched", TEXT)
    assert hover_code(source, 6, 1) is None
    assert hover_code(source, 2, 6) is None
    assert hover_code(source, 99, 1) is None
    assert hover_code(Source("broken", "bubble bubble {"), 1, 3) is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TEXT, []),
        (TEXT.replace("== P\n", "== M\n"), [("S501", 7, 3)]),
        (TEXT.replace("F0  F1", "F1  F0"), [("S204", 6, 50)]),
        (TEXT.replace("= 4)", ")").replace("F0  F1", "F1  F0").replace("ranks = 2", "ranks"), []),
        (TEXT.replace("place v", "place w"), [("S104", 4, 3)]),
        (TEXT.replace("{ F0", "{ ?"), [("S002", 6, 50)]),
    ],
)
def test_findings_are_those_of_check(text: str, expected: list[tuple[str, int, int]]) -> None:
    assert [finding.position for finding in findings(Source("mine.sched", text))] == expected


# The server.


@pytest.fixture
def client() -> Iterator[LanguageClient]:
    needed("pygls")
    running = LanguageClient()
    yield running
    running.process.kill()
    running.process.communicate()


@pytest.mark.slow
def test_a_file_is_written_with_the_servers_help(client: LanguageClient) -> None:
    uri = "file:///mine.sched"
    capabilities = client.request("initialize", processId=None, rootUri=None, capabilities={})["capabilities"]
    assert capabilities["hoverProvider"]
    assert capabilities["documentFormattingProvider"]
    client.notify("initialized")
    broken = TEXT.replace("== P\n", "== P*Q\n")
    document = {"uri": uri, "languageId": "sched", "version": 1, "text": "# 🙂 ü\n" + broken}
    client.notify("textDocument/didOpen", textDocument=document)
    (found,) = client.diagnostics()["diagnostics"]
    assert found["code"].startswith("S1")
    assert found["source"] == "schedc"
    assert found["range"] == {"start": {"line": 7, "character": 31}, "end": {"line": 7, "character": 32}}

    changes = [{"text": TEXT.replace("{ F0", "{F0")}]
    client.notify("textDocument/didChange", textDocument={"uri": uri, "version": 2}, contentChanges=changes)
    assert client.diagnostics()["diagnostics"] == []

    place = {"line": 5, "character": 49}
    hover = client.request("textDocument/hover", textDocument={"uri": uri}, position=place)
    assert "`F0`: forward of chunk 0" in hover["contents"]["value"]
    options = {"tabSize": 2, "insertSpaces": True}
    (edit,) = client.request("textDocument/formatting", textDocument={"uri": uri}, options=options)
    assert "all { F0  F1  B1  B0 }" in edit["newText"]
    assert edit["range"]["end"]["line"] == TEXT.count("\n") + 1

    for method, asked, said in (
        ("completion", {"position": place}, {"label": "F1"}),
        ("definition", {"position": {"line": 6, "character": 30}}, {"line": 2, "character": 14}),
        ("references", {"position": {"line": 2, "character": 14}, "context": {"includeDeclaration": True}},
         {"line": 6}),
        ("rename", {"position": {"line": 4, "character": 6}, "newName": "half"}, {"newText": "half"}),
        ("documentSymbol", {}, {"name": "mine"}),
        ("foldingRange", {}, {"startLine": 2, "endLine": 6}),
        ("codeLens", {}, {"title": "draw", "command": "schedc.preview"}),
        ("codeLens", {}, {"line": 2}),
        ("semanticTokens/full", {}, {"data": [2, 9, 4, 5, 0]}),
        ("inlayHint", {"range": {"start": {"line": 0, "character": 0}, "end": {"line": 9, "character": 0}}},
         {"label": "4 times"}),
    ):  # fmt: skip
        answer = client.request(f"textDocument/{method}", textDocument={"uri": uri}, **asked)
        assert _holds(answer, said), (method, answer)

    page = client.request("schedc/preview", uri=uri)["html"]
    assert page == client.request("schedc/preview", uri=uri)["html"]
    assert "<script" in page
    assert "mine (P = " in page
    client.notify("textDocument/didChange", textDocument={"uri": uri, "version": 3}, contentChanges=[{"text": broken}])
    client.diagnostics()
    assert client.request("schedc/preview", uri=uri) == {"html": None}

    client.notify("textDocument/didClose", textDocument={"uri": uri})
    assert client.diagnostics()["diagnostics"] == []
    client.request("shutdown")
    client.notify("exit")
    assert client.process.wait(timeout=10) == 0


def _holds(answer: Any, said: dict[str, Any]) -> bool:
    """Whether some object of an answer has these entries; of a list, its first ones."""
    if isinstance(answer, dict):
        own = all(
            answer.get(key, [])[: len(value)] == value if isinstance(value, list) else answer.get(key) == value
            for key, value in said.items()
        )
        return own or any(_holds(each, said) for each in answer.values())
    return isinstance(answer, list) and any(_holds(each, said) for each in answer)


def test_large_defaults_are_checked_at_smaller_sizes_which_the_hint_names() -> None:
    large = load("dualpipev").text.replace(
        "P: ranks = 4, M: microbatches = 10", "P: ranks = 64, M: microbatches = 9000"
    )
    source = Source("large.sched", large)
    (tree,) = parse(source).schedules
    assert editor_sizes(tree) == {"P": 64, "M": 281}
    assert editor_sizes(parse(load("dualpipev")).schedules[0]) == {}
    assert next(each.text for each in hints(source)).endswith(", checked at P = 64, M = 281")
    assert findings(source, editor_sizes) == []
    wrong = Source("wrong.sched", large.replace("peak_activations == 2*P + 1", "peak_activations == 2*P"))
    (finding,) = findings(wrong, editor_sizes)
    assert (finding.code, "M = 281" in " ".join(finding.notes)) == ("S501", True)
    bound = Source("bound.sched", large.replace("require M >= 2*P", "require M >= 140*P"))
    assert editor_sizes(parse(bound).schedules[0]) == {"P": 8, "M": 2250}  # M has to stay large


@pytest.mark.slow
def test_a_text_that_changes_quickly_is_looked_at_once(client: LanguageClient) -> None:
    client.initialize()
    uri, text = "file:///quick.sched", load("1f1b").text
    client.open(uri, text)
    for version in range(2, 30):
        word = "linera" if version == 29 else "x" * version
        document, change = {"uri": uri, "version": version}, {"text": text.replace("place linear", f"place {word}")}
        client.notify("textDocument/didChange", textDocument=document, contentChanges=[change])
    (finding,) = client.diagnostics()["diagnostics"]
    assert "`linera` is not a placement" in finding["message"]
