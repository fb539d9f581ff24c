"""The table of directives: what a line of a plan means, in the order of a plan's canonical text.

To add a directive:

1. Give it a row in `schedc.syntax.plan_words.PLAN_WORDS` (word, token, form, meaning). Tokens, formatter, hover texts,
   Pygments and fuzzing follow. A line of a new form also needs its rule; see there.
2. Give `Plan` its field in `schedc.ir.plan`, with "off" as the default.
3. Write its row in `notes`, or in ``ROWS`` of a file that is named below, if it has more to say.
4. Where the runtime acts on it: `schedc_runtime.pipeline.build.apply_plan`.
5. A mistake that no code has yet: an entry in `schedc.codes.s1_plans`.
6. ``python -m schedc.editor.textmate > editors/vscode/syntaxes/sched.tmLanguage.json``
7. Cases in tests/compiler/plan/test_plan_directives.py; its line in docs/guide/plans.md and docs/guide/language.md.

Each file reads its lines, writes them, and gives the facts of the plan's report. Contradictions between values stand in
`schedc.ir.contradictions`, which ranks read too.
"""

from schedc.plan.directives import balance, cell, devices, layer_sizes, migrate, offload, recompute, rows
from schedc.plan.directives.base import Directive
from schedc.plan.directives.notes import NOTES

_FILES = (rows, balance, migrate, cell, devices, layer_sizes, offload, recompute)
_ORDER = (
    "tied", "experts", "block", "topology", "tokens", "states", "alltoall", "rows", "overlap", "cell", "capacity",
    "products", "sizes", "hot", "balance", "migrate", "recompute", "slices", "host", "offload", "loss", "shard",
    "parallel", "batch", "fuse", "attention",
)  # fmt: skip
"""The words in the order of the canonical text; others follow."""
_ROWS = {row.word: row for row in (*NOTES, *(row for file in _FILES for row in file.ROWS))}

DIRECTIVES: dict[str, Directive] = {word: _ROWS[word] for word in dict.fromkeys((*_ORDER, *_ROWS))}
"""The directives by their word."""

__all__ = ["DIRECTIVES"]
