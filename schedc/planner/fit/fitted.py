"""A fit: constants, the rows they come from, and how well they predict; written as TOML and read back.

A search reads a fit without the code that makes fits, `schedc.planner.fit.fitting`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.planner.cluster.values import Cluster
from schedc.planner.presets.tables import files
from schedc.planner.reading.keys import Keys, place_of
from schedc.planner.reading.texts import parse_table, read_source
from schedc.planner.times.constants import BY_NAME, OWNERS, SUSTAINED, described, on_device
from schedc.planner.times.problem import Stack
from schedc.planner.times.spread import ROW_SPREAD, ConstantSpread, Triangle, triangle_of_widths
from schedc.source import NOWHERE, Source

SCHEMA, FORMER = "schedc.fit/2", "schedc.fit/1"

_WIDEST = 1.001
"""Widths of its prior that a constant may have: four digits of 1 are rounded."""

IN_OTHERS = {"host": 1e-9, "expert_launch": 1e-9}
"""Constants, in seconds, that a file of version 1 has in others: in `step`, and in `moe_launch`."""

_FORMER_WIDTH = 0.5
"""Width of a constant that rows decide, in widths of its prior, where a file of version 1 does not say it."""

_WIDE = frozenset({"bf16", "fp16"})


SEEN_AXES = ("tp", "pp", "vpp", "dp", "ep", "cp", "zero", "microbatch")
"""Sizes of a run that the constants of a fit follow from, among others."""

SeenRanges: TypeAlias = Mapping[str, tuple[int, int]]
"""By axis: the smallest and the largest value of the rows."""


@dataclass(frozen=True)
class Fit:
    """Constants that were fitted to rows.

    devices, precisions: names of those in the rows. rows: how many. hash: of the text they come from. at_bound,
    at_prior: see `Estimate`. unseen: devices and precisions of a run that its rows lack; empty unless it was forced.
    seen: ranges of sizes in the rows. calibrated: how many times of parts were fitted beside the rows.

    held_pct, width_pct: see `Validation`; 0 where no model was left out.
    spread: logarithm by which measured steps differ from predictions. factor: how many times more models left out
    differ than the fitted rows do; it is in the spread, and in the covariance. triangle: of the covariance of the
    constants, in widths of their priors. software: traits of `Stack` that all rows
    have. known: what is known of all constants on one device (`fit_for`).
    """

    name: str
    devices: tuple[str, ...]
    precisions: tuple[str, ...]
    rows: int
    hash: str
    constants: dict[str, float]
    cv_mape_pct: float = 0.0
    held_pct: float = 0.0
    width_pct: float = 0.0
    at_bound: tuple[str, ...] = ()
    at_prior: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    seen: SeenRanges = field(default_factory=dict)
    calibrated: int = 0
    spread: float = ROW_SPREAD
    factor: float = 1.0
    triangle: Triangle = ()
    software: Mapping[str, bool | int] = field(default_factory=dict)
    known: ConstantSpread | None = field(default=None, compare=False, repr=False)

    def on(self, device: str) -> Fit:
        """The fit for runs on a device, whose clock enters the shares of peak."""
        known = ConstantSpread.of_fit(self.constants, self.triangle, device, self.spread)
        return replace(self, constants=on_device(self.constants, device), known=known)


_READ: Mapping[str, Callable[[Keys, str], Any]] = {
    "name": lambda keys, key: keys.text(key),
    "devices": lambda keys, key: _texts(keys, key),
    "precisions": lambda keys, key: _texts(keys, key),
    "rows": lambda keys, key: keys.integer(key, least=0),
    "calibrated": lambda keys, key: keys.integer(key, default=0, least=0),
    "hash": lambda keys, key: keys.text(key, default=""),
    "cv_mape_pct": lambda keys, key: keys.number(key, default=0.0, above=-1.0),
    "held_pct": lambda keys, key: keys.number(key, default=0.0, above=-1.0, most=100.0),
    "width_pct": lambda keys, key: keys.number(key, default=0.0, above=-1.0),
    "spread": lambda keys, key: keys.number(key, default=ROW_SPREAD, most=1.0),
    "factor": lambda keys, key: keys.number(key, default=1.0, most=100.0),
    "at_bound": lambda keys, key: _texts(keys, key),
    "at_prior": lambda keys, key: _texts(keys, key),
}
"""The keys above the tables of a file, in its order, which are fields of `Fit`; how each is read."""


def fit_text(fit: Fit) -> str:
    """The TOML text of a fit."""
    lines = [f"schema = {json.dumps(SCHEMA)}", *(f"{key} = {json.dumps(getattr(fit, key))}" for key in _READ)]
    if fit.seen:
        lines += ["\n[seen]", *(f"{axis} = {list(ends)}" for axis, ends in fit.seen.items())]
    if fit.software:
        lines += ["\n[software]", *(f"{name} = {json.dumps(value)}" for name, value in fit.software.items())]
    for owner in OWNERS:
        own = [name for name in fit.constants if described(name).owner == owner]
        lines += [f"\n[{owner}]", *(_line(name, repr(fit.constants[name]), described(name).unit) for name in own)]
    lines += ["\n[covariance]"]
    for name, row in zip(fit.constants, fit.triangle, strict=True):
        lines.append(_line(name, f"[{', '.join(repr(number).removesuffix('.0') for number in row)}]", ""))
    return "\n".join(lines) + "\n"


def _line(name: str, value: str, unit: str) -> str:
    key = json.dumps(name) if " " in name else name
    return f"{key} = {value}  # {unit}".rstrip(" #")


def load_fit(path: Path) -> Fit:
    """A fit from its file. Raises `DiagnosticError` (S725) for anything else."""
    return parse_fit(read_source(path, "S725", "fit"))


def parse_fit(source: Source) -> Fit:
    """A fit from its TOML text. Raises `DiagnosticError` (S725) for anything else."""
    keys = Keys(parse_table(source, "S725", SCHEMA, FORMER), source, "S725")
    former = keys.text("schema") == FORMER
    values = {key: read(keys, key) for key, read in _READ.items()}
    clocks = [SUSTAINED + device for device in values["devices"]]
    constants: dict[str, float] = {}
    for table, owners in [("constants", OWNERS)] if former else [(owner, (owner,)) for owner in OWNERS]:
        if (inner := keys.inner(table)) is not None:
            names = [name for owner in owners for name in (*BY_NAME, *clocks) if described(name).owner == owner]
            left = IN_OTHERS if former else {}
            constants |= {
                key: inner.number(key, default=left.get(key), most=described(key).most * 1.001)
                for key in names
                if key in left or inner.has(key)
            }
            inner.refuse_rest()
    if not constants:
        keys.say("constants", "no table of constants", "write the file with `schedc fit`")
    if former:
        keys.taken.add("interval_pct")
        widths = [1.0 if name in values["at_prior"] else _FORMER_WIDTH for name in constants]
        triangle = triangle_of_widths(widths)
    else:
        triangle = _triangle(keys, constants)
    seen, software = _seen(keys), _software(keys)
    keys.refuse_rest()
    keys.stop()
    return Fit(**values, constants=constants, seen=seen, triangle=triangle, software=software)


def _software(keys: Keys) -> Mapping[str, bool | int]:
    """The table `software`: traits of the stack."""
    inner = keys.inner("software")
    if inner is None:
        return {}
    usual = {each.name: each.default for each in fields(Stack)}
    traits = {
        name: inner.flag(name) if isinstance(value, bool) else inner.integer(name, most=8)
        for name, value in usual.items()
        if inner.has(name)
    }
    inner.refuse_rest()
    return traits


def _triangle(keys: Keys, names: Iterable[str]) -> Triangle:
    """The table `covariance`: a row for each constant, one number longer than the row before."""
    inner = keys.inner("covariance")
    if inner is None:
        keys.say("covariance", "no table `covariance`", "write the file with `schedc fit`")
        return ()
    rows = []
    for length, name in enumerate(names, 1):
        row = inner.numbers(name)
        if len(row) != length or row[-1] <= 0.0 or sum(number**2 for number in row) > _WIDEST**2:
            message = f"`covariance.{name}` is not row {length} of the triangle of a covariance within that of priors"
            inner.say(name, message, f"write {length} numbers, the last above 0, whose squares sum up to 1 at most")
        rows.append(row)
    inner.refuse_rest()
    return tuple(rows)


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

    A cluster names a shipped fit, or a file beside its own. The constants are for the cluster's device. Raises
    `DiagnosticError`: S725 for a file that is no fit, S706 for a name without one, S726 for a fit without rows of the
    device and precision. With ``forced``, the fit of S726 is returned, and `unseen` names the lack.
    """
    path = path or _named_by(cluster)
    if path is None:
        return None
    fit = load_fit(path)
    own = cluster.device.name
    device = cluster.alike if own not in fit.devices and cluster.alike in fit.devices else own
    fit = matched(fit, {device}, {precision}, forced)
    here = fit.on(device)
    return replace(here, known=here.known.borrowed()) if here.known and device != own else here


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
