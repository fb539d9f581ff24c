"""A fit: constants, the rows they come from, and how well they predict; written as TOML and read back.

A search reads a fit without what makes one, which is `schedc.planner.fit.fitting`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.planner.cluster.values import Cluster
from schedc.planner.presets.tables import files
from schedc.planner.reading.keys import Keys, place_of
from schedc.planner.reading.texts import parse_table, read_source
from schedc.planner.times.constants import BY_NAME, SUSTAINED, described, on_device
from schedc.source import NOWHERE, Source

SCHEMA = "schedc.fit/1"

_WIDE = frozenset({"bf16", "fp16"})


SEEN_AXES = ("tp", "pp", "vpp", "dp", "ep", "cp", "zero", "microbatch")
"""Sizes of a run that the constants of a fit follow from, among others."""

SeenRanges: TypeAlias = Mapping[str, tuple[int, int]]
"""By axis: the smallest and the largest value of the rows."""


@dataclass(frozen=True)
class Fit:
    """Constants that were fitted to rows.

    devices, precisions: names of those in the rows. rows: how many. hash: of the text they come from. interval_pct: of
    a prediction; 0 where nothing was left out to measure it. at_bound, at_prior: see `Estimate`. unseen: devices and
    precisions that it is used for, and that its rows have not; empty unless it was forced. seen: ranges of sizes in the
    rows. calibrated: how many times of parts were fitted beside the rows.
    """

    name: str
    devices: tuple[str, ...]
    precisions: tuple[str, ...]
    rows: int
    hash: str
    constants: dict[str, float]
    interval_pct: float = 0.0
    cv_mape_pct: float = 0.0
    at_bound: tuple[str, ...] = ()
    at_prior: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    seen: SeenRanges = field(default_factory=dict)
    calibrated: int = 0


_READ: Mapping[str, Callable[[Keys, str], Any]] = {
    "name": lambda keys, key: keys.text(key),
    "devices": lambda keys, key: _texts(keys, key),
    "precisions": lambda keys, key: _texts(keys, key),
    "rows": lambda keys, key: keys.integer(key, least=0),
    "calibrated": lambda keys, key: keys.integer(key, default=0, least=0),
    "hash": lambda keys, key: keys.text(key, default=""),
    "interval_pct": lambda keys, key: keys.number(key, default=0.0, above=-1.0),
    "cv_mape_pct": lambda keys, key: keys.number(key, default=0.0, above=-1.0),
    "at_bound": lambda keys, key: _texts(keys, key),
    "at_prior": lambda keys, key: _texts(keys, key),
}
"""The keys above the tables of a file, in its order, which are fields of `Fit`; how each is read."""


def fit_text(fit: Fit) -> str:
    """The TOML text of a fit."""
    lines = [f"schema = {json.dumps(SCHEMA)}", *(f"{key} = {json.dumps(getattr(fit, key))}" for key in _READ)]
    if fit.seen:
        lines += ["\n[seen]", *(f"{axis} = {list(ends)}" for axis, ends in fit.seen.items())]
    lines.append("\n[constants]")
    for name, number in fit.constants.items():
        key = json.dumps(name) if " " in name else name
        lines.append(f"{key} = {number!r}  # {described(name).unit}".rstrip(" #"))
    return "\n".join(lines) + "\n"


def load_fit(path: Path) -> Fit:
    """A fit from its file. Raises `DiagnosticError` (S725) for anything else."""
    return parse_fit(read_source(path, "S725", "fit"))


def parse_fit(source: Source) -> Fit:
    """A fit from its TOML text. Raises `DiagnosticError` (S725) for anything else."""
    keys = Keys(parse_table(source, "S725", SCHEMA), source, "S725")
    values = {key: read(keys, key) for key, read in _READ.items()}
    inner = keys.inner("constants")
    constants = {}
    if inner is None:
        keys.say("constants", "no table `constants`", "write the file with `schedc fit`")
    else:
        names = (*BY_NAME, *(SUSTAINED + device for device in values["devices"]))
        constants = {key: inner.number(key, most=described(key).most * 1.001) for key in names if inner.has(key)}
        inner.refuse_rest()
    seen = _seen(keys)
    keys.refuse_rest()
    keys.stop()
    return Fit(**values, constants=constants, seen=seen)


def _seen(keys: Keys) -> SeenRanges:
    """The table `seen`: two whole numbers by axis."""
    inner = keys.inner("seen")
    if inner is None:
        return {}
    ends = {axis: inner.integers(axis) for axis in SEEN_AXES if inner.has(axis)}
    for axis, values in ends.items():
        if len(values) != 2:
            inner.say(axis, f"`seen.{axis}` is not a smallest and a largest value", "write [1, 8]")
    inner.refuse_rest()
    return {axis: (values[0], values[-1]) for axis, values in ends.items() if values}


def _texts(keys: Keys, key: str) -> tuple[str, ...]:
    keys.taken.add(key)
    value: Any = keys.table.get(key, [])
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return tuple(value)
    keys.say(key, f"`{key}` is no list of texts", 'write ["name"]')
    return ()


def fit_for(cluster: Cluster, precision: str, path: Path | None = None, forced: bool = False) -> Fit | None:
    """The fit for a cluster: that of a file, else the one that the cluster names, else None: constants are priors.

    A cluster names a shipped fit, or a file beside its own. The constants are those for its device. Raises
    `DiagnosticError`: S725 for a file that is no fit, S706 for a name without one, S726 for a fit without a row of this
    device or precision. With ``forced`` such a fit is returned, and its `unseen` says what it lacks.
    """
    path = path or _named_by(cluster)
    if path is None:
        return None
    fit = matched(load_fit(path), {cluster.device.name}, {precision}, forced)
    return replace(fit, constants=on_device(fit.constants, cluster.device.name))


def matched(fit: Fit, devices: Iterable[str], precisions: Iterable[str], forced: bool) -> Fit:
    """The fit, if its rows have these devices and precisions. Raises `DiagnosticError` (S726) unless it is forced.

    Both types of 16 bits have the same constants.
    """
    lacks = [("device", name, fit.devices) for name in sorted(set(devices) - set(fit.devices))]
    seen = set(fit.precisions) | (_WIDE if _WIDE & set(fit.precisions) else set())
    lacks += [("precision", name, fit.precisions) for name in sorted(set(precisions) - seen)]
    if lacks and not forced:
        raise DiagnosticError([_foreign(fit, *lack) for lack in lacks])
    return replace(fit, unseen=tuple(name for _, name, _ in lacks))


def _named_by(cluster: Cluster) -> Path | None:
    """The file of the fit that a cluster names; None where it names none."""
    shipped = files("fits")
    if not cluster.fit or cluster.fit in shipped:
        return shipped.get(cluster.fit)
    source = cluster.source
    beside = Path(source.name).parent / cluster.fit if source else Path(cluster.fit)
    if "\0" not in cluster.fit and beside.is_file():
        return beside
    span = place_of(source, "fit") if source else NOWHERE
    message = f"`fit` is {cluster.fit[:60]!r}: neither a shipped fit nor a file beside the cluster's"
    raise DiagnosticError(
        [Diagnostic("S706", message, Label(span), help=did_you_mean(cluster.fit, shipped), source=source)]
    )


def _foreign(fit: Fit, what: str, name: str, seen: Iterable[str]) -> Diagnostic:
    message = f"the fit `{fit.name}` has no row with {what} {name}, only {', '.join(seen)}"
    return Diagnostic("S726", message, Label(NOWHERE), help="fit rows of it, or go on with --force-fit")


def beyond(seen: SeenRanges, axes: Mapping[str, object]) -> Iterator[str]:
    """The axes of a plan that lie beyond the rows, with their values: ``ep 64 (rows: 1 to 32)``."""
    for axis, (low, high) in seen.items():
        value = axes.get(axis)
        if isinstance(value, int) and not low <= value <= high:
            rows = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            yield f"{axis} {value:,} (rows: {rows})"
