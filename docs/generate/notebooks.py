"""Pages of the notebooks in `examples/notebooks`: each is run when the site is built, and its outputs are shown."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .notebook_cells import Output, cells_of
from .write import contents, fence

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_RUNNER = Path(__file__).with_name("notebook_cells.py")
_SECONDS = 300


def pages(most: int | None = None) -> dict[str, str]:
    """The pages by file name, and their index. most: how many notebooks are run; the pages of others lack outputs."""
    notebooks = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
    made = {f"{path.stem}.md": page(path, path in notebooks[:most]) for path in notebooks}
    return {"index.md": _index(notebooks), **made}


def page(notebook: Path, run: bool = True) -> str:
    """The cells of a notebook, with their outputs if it is run. Raises `RuntimeError` where a cell fails."""
    parts, cells = [], cells_of(notebook)
    for (kind, text), outputs in zip(cells, _outputs(notebook) if run else [[]] * len(cells), strict=True):
        if kind == "markdown":
            parts.append(text)
        elif text.startswith("!"):
            parts.append(fence("\n".join(f"$ {line[1:]}" for line in text.splitlines()), "console"))
        else:
            parts.append(fence(text, "python"))
        parts += map(_shown, outputs)
    return "\n\n".join([*parts, f"The notebook is `examples/notebooks/{notebook.name}`.", ""])


def _outputs(notebook: Path) -> list[list[Output]]:
    """The outputs of each cell, run by a process of its own in a copy of the examples."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "examples")
        shutil.copytree(EXAMPLES, copy)
        paths = os.pathsep.join([str(EXAMPLES.parent), str(EXAMPLES.parent / "runtime")])
        done = subprocess.run(
            [sys.executable, _RUNNER, notebook],
            cwd=copy / "notebooks", env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
            timeout=_SECONDS,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{notebook.name}: {done.stderr.strip()}")
    return [[(form, text) for form, text in outputs] for outputs in json.loads(done.stdout)]


def _shown(output: Output) -> str:
    form, text = output
    return f"```{{raw}} html\n{text}\n```" if form == "html" else fence(text, "text")


def _index(notebooks: list[Path]) -> str:
    titles = [(path.stem, cells_of(path)[0][1].splitlines()[0].removeprefix("# ")) for path in notebooks]
    return "\n\n".join(
        [
            "# Notebooks",
            "Each of these was run when this site was built. Jupyter opens them from `examples/notebooks` of the "
            "repository, in an environment that has schedc.",
            "\n".join(f"* [{title}]({stem}.md)" for stem, title in titles),
            contents([stem for stem, _ in titles]),
        ]
    )
