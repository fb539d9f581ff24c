"""``schedc checkpoint``: lists, verifies, shows and exports the checkpoints of a run. Only an export loads torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from schedc.diagnostics import clean
from schedc.units import shown
from schedc_runtime.errors import MaterializeError, RuntimeFault
from schedc_runtime.saved.form import COMMIT, step_folder
from schedc_runtime.saved.read import SavedStep, committed_steps, flaws, newest, open_step
from schedc_runtime.saved.write import step_of_folder

SCHEMA = "schedc.checkpoint/1"


class CheckpointAnswer(NamedTuple):
    """What a word answers. lines: for people. table: for programs. whole: False where a step has a flaw."""

    lines: Sequence[str]
    table: dict[str, Any]
    whole: bool = True


def main(arguments: Sequence[str] | None = None) -> int:
    """CheckpointAnswer one word, and return the exit status: 0 done, 1 a flaw or nothing to read."""
    parser = argparse.ArgumentParser(prog="schedc checkpoint")
    parser.add_argument("word", choices=WORDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--to", default="safetensors", choices=("safetensors", "dcp", "hf"))
    parser.add_argument("--config", type=Path)
    parser.add_argument("--shard", type=int, default=4_000_000_000, help="bytes of tensors in a file of safetensors")
    options = parser.parse_args(arguments)
    try:
        answer = WORDS[options.word](options)
    except (RuntimeFault, OSError) as error:
        if options.json:
            print(json.dumps({"schema": SCHEMA, "error": str(error)}))
        print(clean(f"error: {error}"), file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"schema": SCHEMA, **answer.table}))
    else:
        print("\n".join(clean(line).replace("\n", "\\n") for line in answer.lines))
    return 0 if answer.whole else 1


def _list(options: argparse.Namespace) -> CheckpointAnswer:
    """All steps of a run, also those that cannot be read, and those that were not committed. Reads records only."""
    rows: list[dict[str, Any]] = []
    lines = [f"{'step':>10} {'ranks':>6} {'size':>10} {'tensors':>8}"]
    for number in _steps(options.folder):
        try:
            step = open_step(_folder(options.folder, number))
        except MaterializeError as error:
            rows.append({"step": number, "error": error.message})
            lines.append(f"{number:>10,} {error.message}")
            continue
        count = len({name for manifest in step.manifests for name in manifest.tensors})
        rows.append({**_summary(step), "tensors": count})
        lines.append(f"{number:>10,} {step.commit.world:>6,} {shown(step.bytes):>10} {count:>8,}")
    begun = sorted(_begun(options.folder))
    lines += [f"{number:>10,} was begun and not committed: no run loads it" for number in begun]
    return CheckpointAnswer(lines, {"steps": rows, "not_committed": begun})


def _verify(options: argparse.Namespace) -> CheckpointAnswer:
    """Whether each byte of the committed steps is as it was written."""
    rows, lines, whole = [], [], True
    for number in _steps(options.folder):
        try:
            step = open_step(_folder(options.folder, number))
            listed = [(flaw._asdict() | {"path": str(flaw.path)}, str(flaw)) for flaw in flaws(step)]
            size = step.bytes
        except MaterializeError as error:
            listed, size = [({"why": error.message}, error.message)], 0
        rows.append({"step": number, "whole": not listed, "bytes": size, "flaws": [row for row, _ in listed]})
        lines += [f"step {number:,}: {text}" for _, text in listed]
        lines += [f"step {number:,} is whole: {shown(size)} read"] * (not listed)
        whole = whole and not listed
    return CheckpointAnswer(lines, {"steps": rows}, whole)


def _show(options: argparse.Namespace) -> CheckpointAnswer:
    """The tensors of a step, and which ranks hold which boxes of them."""
    step = _one(options.folder)
    held: dict[str, dict[str, Any]] = {}
    for manifest in step.manifests:
        for name, tensor in manifest.tensors.items():
            row = held.setdefault(name, {"dtype": tensor.dtype, "shape": tensor.shape, "ranks": {}})
            row["ranks"][manifest.rank] = [{"offset": box.offset, "size": box.size} for box in tensor.boxes]
    facts = step.commit.facts
    lines = [f"step {step.step:,} of {step.commit.world:,} ranks, {shown(step.bytes)} in {step.folder}"]
    lines += [f"{name}: {json.dumps(value)}" for name, value in facts.items()]
    lines += [line for name, row in sorted(held.items()) for line in _tensor_lines(name, row)]
    return CheckpointAnswer(lines, {**_summary(step), "tensors": held})


def _tensor_lines(name: str, row: dict[str, Any]) -> Iterator[str]:
    whole = [{"offset": (0,) * len(row["shape"]), "size": row["shape"]}]
    ranks = [rank for rank, boxes in row["ranks"].items() if boxes == whole]
    holders = f"  on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
    yield f"{name}  {row['dtype']} {list(row['shape'])}{holders}"
    for rank, boxes in row["ranks"].items():
        if boxes != whole:
            yield f"  rank {rank}: " + ", ".join(_span(box) for box in boxes)


def _span(box: dict[str, Any]) -> str:
    """A box as indices: ``[0:2, 4:8]``."""
    pairs = zip(box["offset"], box["size"], strict=True)
    return f"[{', '.join(f'{first}:{first + size}' for first, size in pairs)}]"


def _export(options: argparse.Namespace) -> CheckpointAnswer:
    """The model of a step as whole tensors in a new folder."""
    from schedc_runtime.checkpoint.exported import export_model

    step = _one(options.folder)
    paths = export_model(step, options.output, options.to, options.shard, options.config)
    size = sum(path.stat().st_size for path in paths)
    files = f"{len(paths)} file{'s' * (len(paths) > 1)}"
    line = f"step {step.step:,}: the model in {files}, {shown(size)}, in {options.output}"
    return CheckpointAnswer([line], {"step": step.step, "files": [str(path) for path in paths], "bytes": size})


WORDS: dict[str, Callable[[argparse.Namespace], CheckpointAnswer]] = {
    "list": _list,
    "verify": _verify,
    "show": _show,
    "export": _export,
}


def _summary(step: SavedStep) -> dict[str, Any]:
    return {"step": step.step, "world": step.commit.world, "bytes": step.bytes, "facts": step.commit.facts}


def _is_step(folder: Path) -> bool:
    return (folder / COMMIT).is_file()


def _steps(folder: Path) -> list[int]:
    """The committed steps of a run, or the one that ``folder`` is. Raises `MaterializeError` where there is none."""
    if _is_step(folder) and (number := step_of_folder(folder)) is not None:
        return [number]
    if steps := committed_steps(folder):
        return steps
    what = f"{folder} has no committed step" if folder.is_dir() else f"there is no folder {folder}"
    begun = f"; {len(_begun(folder))} were begun" if _begun(folder) else ""
    raise MaterializeError(what + begun, "give the folder of a run, or one of its folders step-*")


def _begun(folder: Path) -> list[int]:
    """The steps of a run that are not committed."""
    found = ((step_of_folder(path), path) for path in folder.glob("step-*"))
    return [number for number, path in found if number is not None and not _is_step(path)]


def _folder(folder: Path, number: int) -> Path:
    return folder if _is_step(folder) else step_folder(folder, number)


def _one(folder: Path) -> SavedStep:
    """The step that ``folder`` is, or the newest one of a run that is whole. What was passed over goes to stderr."""
    if _is_step(folder):
        return open_step(folder)
    _steps(folder)
    found = newest(folder)
    for number, why in found.left_out:
        print(clean(f"step {number:,} is passed over: {why}"), file=sys.stderr)
    if found.step is None:
        raise MaterializeError(f"{folder} has no committed step that is whole", "`schedc checkpoint verify` tells why")
    return found.step


if __name__ == "__main__":
    sys.exit(main())
