"""Highlights `.sched` files: a Pygments lexer, for `pygmentize -l sched` and Sphinx.

Its words are read from the grammar and the language's tables, so a new word is highlighted without a change here.
"""

from __future__ import annotations

from pygments.lexer import RegexLexer, bygroups, words  # type: ignore[import-untyped]
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Text  # type: ignore[import-untyped]

from schedc.editor.textmate import keywords
from schedc.ir.ops import LETTERS
from schedc.step.costs.keys import COST_SYMBOLS
from schedc.syntax.plan_words import PLAN_LINES
from schedc.syntax.words import BUILTINS, METRICS, PLACEMENTS, ROLES


class SchedLexer(RegexLexer):  # type: ignore[misc]
    """Tokens of the language's edition 1."""

    name = "sched"
    aliases = ("sched",)
    filenames = ("*.sched",)
    mimetypes = ("text/x-sched",)

    tokens = {  # noqa: RUF012 - the form that Pygments asks for
        "root": [
            (r"##[^\n]*", Comment.Special),
            (r"#[^\n]*", Comment.Single),
            (r"(schedule|plan)(\s+)(\w+)", bygroups(Keyword, Text, Name.Function)),
            (r'"[^"\n]*"', String),
            (r"[FB]\.[a-z_]+(\.[IW])?\b", Name.Builtin.Pseudo),
            (rf"[{LETTERS}][0-9]*(?![A-Za-z0-9_])", Name.Builtin.Pseudo),
            (rf"(\s+)({'|'.join(PLAN_LINES)})(?=[ \t]+[\w\"])", bygroups(Text, Keyword)),
            (words(keywords(), prefix=r"\b", suffix=r"\b"), Keyword),
            (words((*ROLES, *PLACEMENTS), prefix=r"\b", suffix=r"\b"), Keyword.Type),
            (words((*BUILTINS, *METRICS, *COST_SYMBOLS), prefix=r"\b", suffix=r"\b"), Name.Builtin),
            (r"[0-9]+\.[0-9]+", Number.Float),
            (r"[0-9]+\b", Number.Integer),
            (r"\w+", Name),
            (r"\.\.<|//|[=!<>]=|[-+*/%<>=&@]", Operator),
            (r"[(){}\[\],:]", Punctuation),
            (r"\s+", Text),
        ],
    }
