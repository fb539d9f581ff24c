"""A page for every schedule of the library: what it is, its claims, its drawing, its text; and a gallery of all."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from .schedc_command import output_of
from .write import contents, fence

SCHEDULES = Path(__file__).resolve().parents[2] / "schedules"
COMPARED = {"P": 8, "M": 32}
COSTS = {"F": "1", "I": "1", "W": "0.5"}


@cache
def library() -> list[dict[str, Any]]:
    """Name, title and default sizes of each schedule, in the order of `schedc list`."""
    return list(json.loads(output_of("list", "--json", findings=False))["schedules"])


def pages() -> dict[str, str]:
    """The pages and drawings, by file name."""
    files = {"index.md": _index()}
    for entry in library():
        files[f"{entry['name']}.md"] = _page(entry)
        files[f"{entry['name']}.svg"] = drawing(entry["name"], "svg")
    return files


def drawing(name: str, form: str) -> str:
    """The drawing at the default sizes of the file, as ``svg`` or as a page to explore (``html``)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.{form}"
        output_of("show", name, "-o", str(path))
        return path.read_text(encoding="utf-8")


def _index() -> str:
    sizes, costs = (", ".join(f"{name} = {value}" for name, value in given.items()) for given in (COMPARED, COSTS))
    rows = [_row(entry) for entry in library()]
    return "\n\n".join(
        [
            "# Schedules of the library",
            f"All at {sizes} and at costs {costs} per stage, messages free. The peak counts "
            "microbatches on one P-th of the model. A stage has half that size if the model has 2P stages.",
            "\n".join(
                [
                    ":::{table}\n:class: gallery\n",
                    "| drawing | schedule | what it is | bubble | peak activations |\n|---|---|---|---|---|",
                    *rows,
                    ":::",
                ]
            ),
            "`schedc check NAME -D P=8 -D M=32 --cost W=0.5` prints a row with all its ranks. `schedc report NAME` "
            "derives the formulas of a schedule for all sizes and costs.",
            contents([entry["name"] for entry in library()]),
        ]
    )


def _row(entry: dict[str, Any]) -> str:
    sizes = [part for name, value in COMPARED.items() for part in ("-D", f"{name}={value}")]
    costs = [part for name, value in COSTS.items() for part in ("--cost", f"{name}={value}")]
    facts = json.loads(output_of("check", entry["name"], *sizes, *costs, "--json", findings=False))
    share = facts["stages"] / facts["ranks"]
    bubble, peak = f"{facts['bubble_ratio']:.1%}", f"{max(facts['peak_activations']) / share:.4g}"
    name = entry["name"]
    return f"| [![{name}]({name}.svg)]({name}.md) | [`{name}`]({name}.md) | {entry['title']} | {bubble} | {peak} |"


def _page(entry: dict[str, Any]) -> str:
    name = entry["name"]
    text = (SCHEDULES / f"{name}.sched").read_text(encoding="utf-8")
    sizes = ", ".join(f"{size} = {value}" for size, value in entry["sizes"].items())
    return "\n\n".join(
        [
            f"# {name}",
            _documentation(text),
            f"![{name} at {sizes}]({name}.svg)",
            f'<a href="../../drawings/{name}.html">The same drawing as a page to explore</a>: zoom, hover, sizes.',
            f"## Claims\n\nWhat `schedc check {name}` decides at these sizes, for all costs:",
            fence(output_of("check", name), "text"),
            "## The whole order",
            fence(text, "sched"),
            f"`schedc report {name}` derives the formulas for all sizes; `schedc show {name}` draws other sizes. "
            f"The [language](../../guide/language.md) says what each line means.",
            "",
        ]
    )


def _documentation(text: str) -> str:
    """The ``##`` lines of the file; a paragraph ends where a line names the source."""
    lines = [line.removeprefix("##").strip() for line in text.splitlines() if line.startswith("##")]
    return "\n".join(f"\n{line}" if line.startswith("Source:") else line for line in lines)
