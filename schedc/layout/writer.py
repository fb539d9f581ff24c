"""A `Layout` as Megatron's layout string: what `parse_layout` reads back to the same value."""

from __future__ import annotations

from itertools import groupby

from schedc.layout.parts import DECODER, Layout, PartKind

_LETTERS = {PartKind.EMBEDDING: "E", PartKind.MTP: "m", PartKind.HEAD: "L", PartKind.NOOP: "noop"}
_LETTERS |= dict.fromkeys(DECODER, "t")


def write_layout(layout: Layout) -> str:
    """The string: equal parts and equal stages that follow each other are written once, with a repetition.

    Which layers are MoE is not in the string: `parse_layout` is told the number of dense ones.
    """
    *firsts, last = (_stage([_LETTERS[part.kind] for part in parts]) for parts in layout.stages)
    return "".join(_run(stage, len(list(group))) for stage, group in groupby(firsts)) + last


def _run(stage: str, count: int) -> str:
    """``count`` stages, each with the ``|`` after it."""
    plain, short = f"{stage}|" * count, f"({stage}|)*{count}"
    return plain if len(plain) <= len(short) else short


def _stage(letters: list[str]) -> str:
    runs = ((letter, len(list(group))) for letter, group in groupby(letters))
    text = "".join(_repeated(letter, count) for letter, count in runs)
    return text.strip(",").replace(",,", ",")


def _repeated(letter: str, count: int) -> str:
    """The shorter form; the one word among letters stands between commas."""
    text = min(letter * count, f"{letter}*{count}", key=len) if count > 1 else letter
    return f",{text}," if letter == "noop" else text
