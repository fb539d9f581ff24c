"""A page for every diagnostic code: its explanation, a wrong and a right file, and what `schedc check` says."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from schedc.codes import CODES, FAMILIES
from schedc.codes.base import DiagnosticCode

from .schedc_command import output_of
from .write import BESIDE_THE_TREE, fence

MISTAKES = Path(__file__).resolve().parents[2] / "examples" / "mistakes"

_COMMANDS = {
    "config.json": (("plan", "--show-model", "config.json"), "json"),
    "rows.csv": (("fit", "rows.csv"), "text"),
    "cluster.toml": (("plan", "--show-model", "qwen3-8b", "cluster.toml"), "toml"),
}
"""The command that reads a file that is no schedule, by its name, and the language of the file."""


def pages() -> dict[str, str]:
    return {"index.md": _index(), **{f"{code.code}.md": _page(code) for code in CODES.values()}}


def _index() -> str:
    parts = [
        "# Diagnostic codes",
        "Every finding of the compiler has a code; the runtime uses the same codes where a plan contradicts itself. "
        "`schedc explain CODE` prints the page of a code in the terminal.",
    ]
    for family, title in FAMILIES.items():
        rows = [f"| [{code.code}]({code.code}.md) | {code.title} |" for code in _family(family)]
        parts.append("\n".join([f"## {family}: {title}\n", "| code | meaning |", "|---|---|", *rows]))
    return "\n\n".join([*parts, ""])


def _family(family: str) -> list[DiagnosticCode]:
    return [code for code in CODES.values() if code.code.startswith(family)]


def _page(code: DiagnosticCode) -> str:
    parts = [BESIDE_THE_TREE, f"# {code.code}: {code.title}", "[All codes](index.md)", code.explanation.strip()]
    if code.wrong:
        arguments, form = _COMMANDS.get(code.file, (("check", "wrong.sched"), "sched"))
        said = output_of(*arguments, files={"cluster.toml": CODES["S705"].right, arguments[-1]: code.wrong})
        parts += ["## Wrong", fence(code.wrong, form), f"`schedc {arguments[0]}` says:", fence(said, "text")]
        parts += ["## Right", fence(code.right, form)]
    for path in sorted(MISTAKES.glob("*.sched")):
        if f"error[{code.code}]" in _said_of(path):
            parts += ["## A typical mistake", f"`examples/mistakes/{path.name}`; the right line stands behind it:"]
            parts += [fence(path.read_text(encoding="utf-8"), "sched"), fence(_said_of(path), "text")]
    return "\n\n".join([*parts, ""])


@cache
def _said_of(path: Path) -> str:
    """What the compiler says of a mistake; the tests hold the file beside it."""
    return path.with_suffix(".txt").read_text(encoding="utf-8")
