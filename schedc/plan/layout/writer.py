"""Writes a `Layout` as Megatron's layout string, which `parse_layout` reads back to the same value."""

from __future__ import annotations

from itertools import groupby

from schedc.plan.layout.parts import DECODER, Layout, PartKind

_LETTERS = {PartKind.EMBEDDING: "E", PartKind.MTP: "m", PartKind.HEAD: "L", PartKind.NOOP: "noop"}
_LETTERS |= dict.fromkeys(DECODER, "t")


def write_layout(layout: Layout) -> str:
    """The string. Equal parts, or equal stages, that follow each other are written once with a repetition.

    The string does not say which layers are MoE; `parse_layout` takes the number of dense layers.
    """
    *firsts, last = (_stage([_LETTERS[part.kind] for part in parts]) for parts in layout.stages)
    return "".join(_run(stage, len(list(group))) for stage, group in groupby(firsts)) + last


def _run(stage: str, count: int) -> str:
    """``count`` equal stages, each with the ``|`` after it, in the shorter form."""
    plain, short = f"{stage}|" * count, f"({stage}|)*{count}"
    return plain if len(plain) <= len(short) else short


def _stage(letters: list[str]) -> str:
    runs = ((letter, len(list(group))) for letter, group in groupby(letters))
    text = "".join(_repeated(letter, count) for letter, count in runs)
    return text.strip(",").replace(",,", ",")


def _repeated(letter: str, count: int) -> str:
    """A repeated letter in the shorter form. `noop`, the one word among letters, gets commas around it."""
    text = min(letter * count, f"{letter}*{count}", key=len) if count > 1 else letter
    return f",{text}," if letter == "noop" else text
