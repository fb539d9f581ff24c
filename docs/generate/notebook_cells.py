"""Runs the cells of a notebook, in the current folder, as Jupyter does: ``python notebook_cells.py FILE``.

A cell is Python, or lines behind ``!``, which a shell runs. Its last expression is shown unless ``;`` ends it. Printed
is a JSON list with a list of outputs for each cell: (``text`` or ``html``, the output).
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

Output = tuple[str, str]


def cells_of(path: Path) -> list[tuple[str, str]]:
    """(``markdown`` or ``code``, text) of each cell."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return [(cell["cell_type"], "".join(cell["source"])) for cell in document["cells"]]


def run_cell(text: str, names: dict[str, Any]) -> list[Output]:
    """The outputs of one cell, which may change ``names``. Raises what its Python raises, and where a command fails."""
    if text.startswith("!"):
        return [("text", "".join(_shell(line.removeprefix("!")) for line in text.splitlines()))]
    tree = ast.parse(text)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    shown = None if text.rstrip().endswith(";") or value is None else _shown(value)
    return [output for output in (("text", printed.getvalue()), shown) if output and output[1]]


def _shown(value: object) -> Output:
    html = getattr(value, "_repr_html_", None)
    return ("html", html()) if html else ("text", repr(value))


def _shell(command: str) -> str:
    """What a command prints. 3 is no failure: `schedc diagnose` found a cause."""
    done = subprocess.run(command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{command} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ["COLUMNS"] = "100"
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = [run_cell(text, names) if kind == "code" else [] for kind, text in cells_of(Path(sys.argv[1]))]
    print(json.dumps(outputs))
