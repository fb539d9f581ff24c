"""The grammar of editors, as TextMate and VS Code read it: made from the words of the language.

``python -m schedc.editor.textmate > editors/vscode/syntaxes/sched.tmLanguage.json`` writes the file. A test holds the
file against this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib.resources import files

from schedc.ir.ops import LETTERS
from schedc.syntax.plan_words import PLAN_LINES
from schedc.syntax.words import BUILTINS, METRICS, PLACEMENTS, ROLES

_STRINGS = re.compile(r'"([a-z]+)"')


def keywords() -> list[str]:
    """The words that the grammar itself spells out, in alphabetical order."""
    lines = files("schedc.syntax").joinpath("grammar.lark").read_text(encoding="utf-8").splitlines()
    return sorted({word for line in lines for word in _STRINGS.findall(line.split("//")[0])})


def textmate_grammar() -> str:
    """The grammar as JSON text; ends with a newline."""
    named = {
        "string.quoted.double.sched": r'"[^"]*"',
        "support.constant.op.sched": rf"\b[{LETTERS}][0-9]*(?![A-Za-z0-9_])",
        "keyword.other.sched": rf'\b{_any_of(PLAN_LINES)}\b(?=\s+[\w"])',
        "keyword.control.sched": rf"\b{_any_of(keywords())}\b",
        "storage.type.sched": rf"\b{_any_of(sorted({*ROLES, *PLACEMENTS}))}\b",
        "support.function.sched": rf"\b{_any_of(sorted({*BUILTINS, *METRICS}))}\b",
        "constant.numeric.sched": r"\b[0-9]+(?:\.[0-9]+)?\b",
        "keyword.operator.sched": r"\.\.<|//|[=!<>]=|[-+*/%<>=&@]",
    }
    patterns: list[object] = [
        {"name": "comment.block.documentation.sched", "match": "##.*$"},
        {"name": "comment.line.number-sign.sched", "match": "#.*$"},
        _definition("schedule|plan", "entity.name.function.sched"),
        _definition("fn", "entity.name.function.sched"),
        _definition("phase", "entity.name.section.sched"),
        *({"name": name, "match": match} for name, match in named.items()),
    ]
    grammar = {"name": "sched", "scopeName": "source.sched", "fileTypes": ["sched"], "patterns": patterns}
    return json.dumps(grammar, indent=2) + "\n"


def _any_of(words: Iterable[str]) -> str:
    return f"(?:{'|'.join(words)})"


def _definition(words: str, scope: str) -> dict[str, object]:
    """The rule of a keyword with the name that it defines behind it."""
    captures = {"1": {"name": "keyword.control.sched"}, "2": {"name": scope}}
    return {"match": rf"\b({words})\s+(\w+)", "captures": captures}


if __name__ == "__main__":
    print(textmate_grammar(), end="")
