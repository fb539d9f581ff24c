"""Makes the archives of the page, inside Pyodide: bytecode of modules, and those of a first drawing by themselves.

`pack.mjs` runs this file. A tab would compile each module anew from its text, and build the tables of the grammar.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from importlib.util import MAGIC_NUMBER, source_hash
from io import BytesIO
from marshal import dumps
from pathlib import Path
from zipfile import ZipFile

PAGE, SCRATCH = Path("/page"), Path("/scratch")
HOME = Path("/lib/python3.12/site-packages")
LIBRARY = Path("/lib/python312.zip")
FOR_COMPILERS = frozenset({".a", ".c", ".h", ".in", ".pxd", ".pyi"})
"""Endings of files that nothing reads where Python runs."""
MODULES = frozenset({".py", ".so"})
TABLES, NAMES = "schedc/syntax/grammar.tables", "playground/later.txt"


def main() -> None:
    shutil.unpack_archive(SCRATCH / "packages.zip", HOME)
    files = {
        name: own for name, own in _read(SCRATCH / "packages.zip").items() if Path(name).suffix not in FOR_COMPILERS
    }
    files[TABLES] = _tables()
    first = _loaded() | {name for name in files if Path(name).suffix not in MODULES or name.startswith("playground/")}
    later = {name: files.pop(name) for name in list(files) if name not in first}
    files[NAMES] = "\n".join(map(_dotted, later)).encode()
    _write(SCRATCH / "first.zip", files, HOME)
    _write(SCRATCH / "later.zip", later, HOME)
    _write(SCRATCH / "python_stdlib.zip", _read(PAGE / "pyodide" / "python_stdlib.zip"), LIBRARY)


def _read(archive: Path) -> dict[str, bytes]:
    with ZipFile(archive) as packed:
        return {name: packed.read(name) for name in packed.namelist() if not name.endswith("/")}


def _dotted(name: str) -> str:
    """The module of a file."""
    return name.partition(".")[0].removesuffix("/__init__").replace("/", ".")


def _tables() -> bytes:
    """The tables of the grammar, as `schedc.syntax.parser.grammar` reads them."""
    from schedc.syntax.parser import grammar

    tables = BytesIO()
    grammar()[0].save(tables)
    return tables.getvalue()


def _loaded() -> set[str]:
    """The files of the modules that opening the page and drawing every schedule of the library load."""
    from playground.answers import answer

    asked = {"text": "", "form": "sched", "name": "", "schedule": "", "sizes": {}, "costs": {}}
    for each in json.loads(answer(json.dumps({**asked, "do": "open"})))["library"]:
        for do in ("draw", "colour"):
            answer(json.dumps({**asked, **each, "do": do}))
    paths = [Path(own) for module in sys.modules.values() if (own := getattr(module, "__file__", None))]
    return {path.relative_to(HOME).as_posix() for path in paths if path.is_relative_to(HOME)}


def _write(archive: Path, files: Mapping[str, bytes], place: Path) -> None:
    """Writes files with their modules as bytecode. place: the folder in the page, which tracebacks name."""
    with ZipFile(archive, "w") as packed:
        for name, content in files.items():
            if name.endswith(".py"):
                packed.writestr(f"{name}c", _bytecode(content, f"{place}/{name}"))
            else:
                packed.writestr(name, content)


def _bytecode(text: bytes, place: str) -> bytes:
    """A module that is never compared with its text (PEP 552)."""
    code = compile(text, place, "exec", dont_inherit=True)
    return MAGIC_NUMBER + (1).to_bytes(4, "little") + source_hash(text) + dumps(code)


if __name__ == "__main__":
    main()
