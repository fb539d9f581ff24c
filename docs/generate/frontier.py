"""The page of the site on the frontier: bubble against memory of the whole library at one size, as a table."""

from __future__ import annotations

import json
import tempfile
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from schedc.cli import main
from schedc.frontier.kept import kept_folder

_SIZES = ("-D", "P=8", "-D", "M=32")
PAGE = "frontier.html"
"""The page to explore, which lies beside the drawings."""


@cache
def _told() -> tuple[dict[str, Any], str]:
    """The JSON of `schedc frontier`, and its page. The command runs where paths of kept orders are short."""
    with tempfile.TemporaryDirectory() as folder, chdir(kept_folder().parents[1]):
        path = Path(folder) / PAGE
        command = ["frontier", *_SIZES, "--json", "-o", str(path)]
        facts = json.loads(CliRunner().invoke(main, command, catch_exceptions=False).stdout)
        return facts, path.read_text(encoding="utf-8")


def explored() -> str:
    """The page to explore."""
    return _told()[1]


def pages() -> dict[str, str]:
    """The page of the site, by file name."""
    facts, _ = _told()
    points = sorted(facts["points"], key=lambda point: (point["memory"], point["bubble"]))
    floors = [_floors(line) for line in facts["floors"]]
    return {
        "index.md": "\n\n".join(
            [
                "# Bubble against memory",
                f"Every schedule of the library at P = {facts['ranks']} and M = {facts['microbatches']}, with each "
                "number v of stages per rank. Both figures count microbatches of a rank, with F = I = W = 1 and free "
                "messages. "
                "A bold row is on the front: no schedule here has less of one figure and no more of the other.",
                f'<a href="../../drawings/{PAGE}">The same as a page to explore</a>: sliders of F, I, W and p2p, and a '
                "drawing and a text behind each point.",
                "The zero-bubble wave, `zb_wave`, is for machines whose memory holds P microbatches and whose messages "
                "are cheap. Its bubble is (P-1)F/v, and no order of as many stages on one copy of the weights has "
                "less. It sends v/2 times the messages of `zbv`. Its [page](../schedules/zb_wave.md) says at which "
                "`p2p` `zbv` is better.",
                "\n".join(["| memory | bubble | v | copies | command |", "|---|---|---|---|---|", *map(_row, points)]),
                "The command of a row counts chunks: its figures are v times as large.",
                "## What no order undercuts\n\nFor a split backward on one copy of the weights, on waves with v stages "
                "per rank. [Floors](../../inside/floors.md) has the proofs.",
                "\n".join(["| v | least bubble at each memory |", "|---|---|", *floors]),
                "## Orders below P microbatches\n\nThe repository keeps orders that searches found. The first lines of "
                "a file have the command of its search. The orders are checked and priced anew whenever this page is "
                "made. `proved`: no order of these ops on waves with v stages per rank has a smaller bubble in this "
                "memory, where F = I = W = 1 and messages are free. Elsewhere no such order undercuts the floor.",
                "\n".join(
                    [
                        "| v | memory | bubble | floor | command |",
                        "|---|---|---|---|---|",
                        *map(_kept, facts["searched"]),
                    ]
                ),
                "`schedc frontier -D P=8 -D M=32` prints this page, at other sizes and costs too.",
                "",
            ]
        )
    }


def _row(point: dict[str, Any]) -> str:
    mark = "**" if point["on_front"] else ""
    cells = [f"{mark}{point[key]:.4g}{mark}" for key in ("memory", "bubble")]
    command = f"`{point['command']}`"
    if not point["kept"]:
        command = f"[{command}](../schedules/{point['schedule']}.md)"
    return f"| {' | '.join([*cells, str(point['per_rank']), str(point['copies']), command])} |"


def _kept(cell: dict[str, Any]) -> str:
    floor = "proved" if cell["proven"] else f"{cell['bound']:.4g}"
    return f"| {cell['per_rank']} | {cell['memory']:g} | {cell['bubble']:.4g} | {floor} | `{cell['command']}` |"


def _floors(line: dict[str, Any]) -> str:
    values = zip(line["memory"], line["bubble"], strict=True)
    return f"| {line['per_rank']} | {', '.join(f'{bubble:.4g} at {memory:g}' for memory, bubble in values)} |"
