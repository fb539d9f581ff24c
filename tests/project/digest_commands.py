"""Digests of what the commands print and write (see digests.py)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from digest_editor import editor_cases, highlighted
from digest_values import LIBRARY, anonymous, sha

import schedc
from schedc.cli import COMMANDS, main

EXAMPLES = {
    "plans.sched": "plan published =",
    "dsv3.sched": "experts 256 top 8",
    "bubbles.sched": "schedule recompute_1f1b",
    "cells.toml": 'stages = "moe*4"',
    "hops.toml": 'method = "hierarchical"',
    "uneven.toml": "F = [1.2, 1.0, 1.0, 1.4]",
    "order.csv": "0F0",
}
"""Inputs among the examples, by a text that only they have: their places and names may change."""

SIZES = ("", "P=2 M=4", "P=3 M=7", "P=4 M=16", "P=8 M=24")
MORE_SIZES = {
    "adaptive_pipe": ("P=2 M=6 v=3", "P=4 M=8 v=1"),
    "hanayo": ("P=4 M=8 w=1", "P=2 M=5 w=3"),
    "interleaved_1f1b": ("P=2 M=6 v=3", "P=4 M=8 v=4"),
    "interleaved_overlap": ("P=2 M=6 v=3", "P=4 M=8 v=4"),
    "looped_bfs": ("P=2 M=6 v=3", "P=4 M=5 v=4"),
    "seq1f1b": ("P=2 M=3 k=3", "P=4 M=8 k=4"),
    "zb_wave": ("P=2 M=4 w=1", "P=3 M=6 w=3"),
    "zb_auto": ("P=4 M=8 limit=4", "P=4 M=12 keep=2"),
    "zb_greedy": ("P=4 M=8 limit=4", "P=3 M=9 limit=6"),
}
TARGETS = ("csv", "csv-lowered", "torchtitan", "nemo", "megatron", "trace", "dot", "text", "program", "json")

PER_SCHEDULE = (
    "check {} --json",
    "check {} -D P=4 -D M=8 --cost-file uneven.toml",
    "check {} -D P=4 -D M=16 --cost F=2 --cost W=0.5 --cost p2p=0.25 --json",
    "show {} -o out.html",
    "show {} --format term",
    "show {} -D P=4 -D M=8 --cost-file uneven.toml --width 900",
    *(f"export {{}} --to {target}" for target in TARGETS),
)
"""Commands that run on every schedule of the library."""

SINGLE = (
    "check dualpipev.sched -D P=40 -D M=80",
    "check dualpipev.sched -D P=40 -D M=80 --ranks all",
    "check dualpipev.sched -D P=4 -D M=16 --cost-file cells.toml",
    "check dualpipev.sched -D P=4 -D M=16 --cost-file cells.toml --json",
    "check 1f1b_overlap.sched -D P=2 -D M=6 --cost-file hops.toml --json",
    "check zbh1.sched --sweep 'P<=5, M<=2*P'",
    "check zbh1.sched --sweep 'P<=5, M<=2*P' --json",
    "check vhalf.sched --sweep 'P<=4, M<=8' --json",
    "report 1f1b.sched --json",
    "report 1f1b.sched",
    "report gpipe.sched --latex",
    "report gpipe.sched -D P=2 -D M=4 --cost-file cells.toml",
    "report gpipe.sched -D P=2 -D M=4 --cost-file hops.toml --json",
    "diff 1f1b.sched zbh1.sched",
    "diff 1f1b.sched zbh1.sched --json",
    "diff dualpipe.sched dualpipev.sched -D P=4 -D M=10 --json",
    "diff plans.sched:balanced plans.sched:published",
    "diff order.csv order.csv --json",
    "import order.csv",
    "check order.csv --json",
    "show order.csv --format term",
    "export order.csv --to csv-lowered",
    "show 1f1b.sched --with dualpipev.sched -D P=4 -D M=10 --with-cost F=1 -o out.html",
    "show 1f1b.sched --with zbv.sched -D P=4 -D M=10 --format term --width 800",
    "show dualpipev.sched -D P=2 -D M=4 --graph --format dot",
    "show dualpipev.sched --graph cells --cost-file hops.toml --format dot",
    "show dualpipev.sched --cell FB --cost-file hops.toml -o out.svg",
    "show dualpipev.sched --cell FB --cell-stages 0,7 --cost-file cells.toml --format term",
    "show dualpipev.sched --cost-file cells.toml -o out.html",
    "show 1f1b_overlap.sched --cell F --cost-file cells.toml",
    "show bubbles.sched:bubbles --format term",
    "show bubbles.sched:bubbles -o out.html",
    "show dsv3.sched -D M=16 -D P=8 -o out.html",
    "check dsv3.sched",
    "check dsv3.sched --json",
    "check plans.sched:published --json",
    "check plans.sched:balanced",
    "check plans.sched:dsv3 --json",
    "check bubbles.sched:bubbles --json",
    "check bubbles.sched:recompute_1f1b -D P=4 -D M=8",
    "compile plans.sched:dsv3 -o out",
    "compile dsv3.sched -o out",
    "compile bubbles.sched:bubbles -o out",
    "compile experts.sched:hot -o out --json",
    "compile experts.sched:byhand -o out",
    "compile experts.sched:adaptive -o out",
    "check experts.sched:hot",
    "check experts.sched:hot --json",
    "check experts.sched:byhand --json",
    "check experts.sched:byhand --cost-file hops.toml --json",
    "check experts.sched:adaptive",
    "show experts.sched:byhand --cell FB --cost-file hops.toml -o out.svg",
    "report experts.sched:adaptive --json",
    "layout --layers 61 --pad 3 --at last --schedule interleaved_1f1b.sched -D P=8 -D v=2 -D M=54",
    "layout --layers 61 --pad 3 --at auto --schedule interleaved_1f1b.sched -D P=8 -D v=2 -D M=54"
    " --cost embedding=0.3 --cost head=1 --json",
    "layout --layers 61 --dense 3 --mtp 1 --auto --schedule interleaved_1f1b.sched -D P=8 -D v=2 -D M=54"
    " --cost moe=1.4 --cost mtp=1.6 --cost head=0.9 --cost embedding=0.3 --objective makespan",
    "layout 'Et*3|(tt|)*29,m|L'",
    "layout 'E noop t*2 | ((t|)*2 tt|)*3 m | L' --json",
    "layout --schedule plans.sched:dsv3",
    "layout --schedule experts.sched:hot --json",
    "export interleaved_1f1b.sched -D P=2 --to megatron --layout 'Et*3|tt,noop|tt|ttL'",
    "export zbh1.sched --cost W=0.5 --cost p2p=0.1 --to trace",
    *(f"export dsv3.sched --to {target}" for target in TARGETS),
    "fmt messy.sched",
    "fmt --diff messy.sched",
    "freeze zb_auto.sched -D P=3 -D M=7 --cost W=0.5",
    "check zb_auto.sched -D P=3 -D M=7",
    "tune 1f1b.sched -D P=3 -D M=5 --cost-file uneven.toml --effort 0.05 --workers 1 --json -o out.order",
)

WRITTEN = ("out", "out.html", "out.svg", "out.order", "messy.sched", "zb_auto.P3-M7.order")
WRITERS = ("compile", "show", "tune", "fmt", "freeze", "plan")
WRONG = (
    "check no_such_schedule", "check 1f1b.sched -D Q=3", "check 1f1b.sched -D P=0", "check 1f1b.sched --cost X=3",
    "check zbv.sched -D M=1", "check 1f1b.sched --sweep 'P<='", "export chimera.sched --to megatron",
    "show 1f1b.sched --cell FB", "layout 'Et|x'", "layout", "import plans.sched", "check messy.sched -D P=100000",
    "check plans.sched", "check plans.sched:nothing", "explain S999", "check 1f1b.sched --cost-file order.csv",
    "diff 1f1b.sched plans.sched:nothing", "freeze 1f1b.sched", "check wrong.sched", "check wrong.sched --json",
)  # fmt: skip
"""Requests that are refused."""

EXPERTS = """sched 1
plan hot = dualpipev(P = 2, M = 8) {
  layers 8 dense 1
  experts 64 top 8 groups 8 limit 4 shared 1 width 512 hidden 1024
  topology nodes 2 x 4 rail 50 GB/s node 400 GB/s
  tokens 1024 dtype bf16
  alltoall auto
  hot 3 until imbalance < 1.2
  overlap auto
  recompute chunk 0 light
  recompute stage [1, 3] medium
  memory 60 GB
}
plan byhand = dualpipev(P = 4, M = 16) {
  layers 16
  experts 64 top 8
  topology nodes 2 x 4
  alltoall hierarchical
  capacity 1.25 drop position
  cell F & B {
    compute F.attn B.mlp.I B.mlp.W F.mlp B.attn.I B.attn.W
    comm B.combine F.dispatch B.dispatch F.combine
  }
}
plan adaptive = gpipe(P = 4, M = 8) {
  layers 8 pad 4 at [2, 5, 8, 11]
  experts 64 top 8 shared 1 width 512 hidden 1024
  topology nodes 1 x 8 node 400 GB/s
  tokens 1024 dtype fp16
  capacity 1.5 drop probs
  hot auto
  recompute full adaptive(2.0) by group
}
"""
MESSY = """sched 1
schedule messy(P:ranks=4,M : microbatches=8){
place linear
   rank r{ let w=min(P-1-r,M)   # warm-up
  phase a repeat w {F}
      phase b repeat M-w { F
 B }
  phase c repeat w { B } }
 expect makespan==(M+P-1)*(F+B) }
"""
WRONG_SCHEDULE = """sched 1
schedule wrong(P: ranks = 4, M: microbatches = 8) {
  place linear
  rank r {
    repeat M { B }
    repeat M { F }
    repeat x { F }
  }
  expect bubbles == 3
}
"""


def cases(group: str, root: Path) -> Iterator[tuple[str, str]]:
    """(case, sha256) of a group; ``root``: the checkout whose examples are read. Writes into the current folder."""
    inputs(root)
    schedules = sorted(path.stem for path in LIBRARY.glob("*.sched"))
    if group == "compile":
        for name in schedules:
            for sizes in (*SIZES, *MORE_SIZES.get(name, ())):
                yield from compile_cases(name, sizes)
        return
    lines = [line.format(f"{name}.sched") for name in schedules for line in PER_SCHEDULE] + [*SINGLE, *WRONG]
    mistakes = sorted(path.name for path in Path("mistakes").glob("*.sched"))
    lines += [f"check mistakes/{name} --json" for name in mistakes]
    if group == "text":
        for line in lines:
            yield from text_cases(line)
        yield from ((f"highlight {name}.sched", highlighted(f"{name}.sched")) for name in (*schedules, "experts"))
        return
    names = [f"{name}.sched" for name in schedules]
    lines += [f"check verbatim/{name}" for name in mistakes] + ["list", "explain"]
    lines += [f"explain {code}" for code in codes()] + [f"{name} --help" for name in ("", *COMMANDS)]
    for line in lines:
        yield from word_cases(line)
    yield from ((f"comments of {name}", sha(schedc.compile(name.removesuffix(".sched")).doc)) for name in names)
    yield from editor_cases(
        ["dualpipev.sched", "zb_auto.sched", "bubbles.sched", "experts.sched", "dsv3.sched", "messy.sched"]
    )


def inputs(root: Path) -> None:
    """The inputs, by fixed names in the current folder, without their lines of comments."""
    for path in LIBRARY.glob("*.sched"):
        Path(path.name).write_text(without_comments(path), encoding="utf-8")
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / "examples").rglob("*.*"))
             if path.suffix in (".sched", ".toml", ".csv")}  # fmt: skip
    for name, mark in EXAMPLES.items():
        (path, *_) = [
            path
            for path, text in texts.items()
            if mark in text and path.suffix == Path(name).suffix and path.parent.name != "mistakes"
        ]
        Path(name).write_text(without_comments(path), encoding="utf-8")
    for folder in ("mistakes", "verbatim"):
        Path(folder).mkdir()
    for path in (root / "examples" / "mistakes").glob("*.sched"):
        Path("mistakes", path.name).write_text(without_comments(path), encoding="utf-8")
        Path("verbatim", path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    for name, text in {"experts": EXPERTS, "messy": MESSY, "wrong": WRONG_SCHEDULE}.items():
        Path(f"{name}.sched").write_text(text, encoding="utf-8")


def without_comments(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#")) + "\n"


def codes() -> list[str]:
    return sorted(set(re.findall(r"^\s*([A-Z]\d{3})\b", invoke("explain").stdout, re.MULTILINE)))


@dataclass(frozen=True)
class Ran:
    """The results of a command: exit code and output, without paths; written files, by digest."""

    status: str
    stdout: str
    stderr: str
    files: dict[str, str]


@cache
def invoke(line: str) -> Ran:
    """A command, run once in this process."""
    result = CliRunner().invoke(main, shlex.split(line), prog_name="schedc")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    written = [name for name in WRITTEN if Path(name).exists()] if line.split()[0] in WRITERS else []
    files = {file: digest for name in written for file, digest in taken(name)}
    return Ran(str(result.exit_code), anonymous(result.stdout), anonymous(result.stderr), files)


def compile_cases(name: str, sizes: str) -> Iterator[tuple[str, str]]:
    """The files that `compile` writes, and the printed facts."""
    flags = "".join(f" -D {size}" for size in sizes.split())
    ran = invoke(f"compile {name}.sched{flags} -o out --format json --format text --format npz --json")
    case = f"{name} {sizes}".strip()
    yield f"{case}/facts", sha(ran.status, facts(ran.stdout))
    yield from ((f"{case}/{file}", digest) for file, digest in ran.files.items())


def text_cases(line: str) -> Iterator[tuple[str, str]]:
    ran = invoke(line)
    yield line, sha(ran.status, facts(ran.stdout))
    yield from ((f"{line} > {file}", digest) for file, digest in ran.files.items())


def word_cases(line: str) -> Iterator[tuple[str, str]]:
    """Sentences: all that goes to stderr, diagnostics as JSON, and whole outputs of commands that explain."""
    ran = invoke(line)
    printed = ran.stdout if re.match("list|explain|.*--help|check.*--json", line) else ""
    if ran.stderr or printed:
        yield line, sha(ran.status, ran.stderr, printed)


def taken(name: str) -> Iterator[tuple[str, str]]:
    """(file, sha256) of a file or of the files in a folder; a result is removed."""
    files = sorted(Path(name).iterdir()) if Path(name).is_dir() else [Path(name)]
    for path in files:
        yield path.name, columns(path) if path.suffix == ".npz" else sha(anonymous(path.read_text(encoding="utf-8")))
        if name.startswith("out"):
            path.unlink()


def columns(path: Path) -> str:
    """The digest of an archive's arrays: names, types, shapes and bytes."""
    with np.load(path) as archive:
        arrays = {name: np.asarray(archive[name]) for name in archive.files}
    return sha(
        *[f"{name} {array.dtype} {array.shape} {array.tobytes().hex()}" for name, array in sorted(arrays.items())]
    )


def facts(text: str) -> str:
    """An output; of JSON without the sentences of diagnostics, which are `words`."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict):
        for finding in value.get("diagnostics", []):
            finding.update(message="", notes=len(finding["notes"]), help=bool(finding["help"]))
    return json.dumps(value)
