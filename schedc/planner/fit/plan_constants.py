"""Finds the constants of plans by their owners: device and fabric by the cluster, the stack by what trains there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from schedc.diagnostics import Diagnostic, RequestError, did_you_mean
from schedc.planner.cluster.values import Cluster
from schedc.planner.fit.fitted import Fit, fit_for, load_fit
from schedc.planner.presets.tables import DEFAULT_STACK, files
from schedc.planner.times.constants import CONSTANTS
from schedc.planner.times.problem import Stack
from schedc.planner.times.spread import ConstantSpread


@dataclass(frozen=True)
class PlanConstants:
    """What prices plans on a cluster.

    fit: of device and fabric; None where these are at their priors. constants: by name. known: how sure they are.
    software: the traits of the stack. origins: where the constants of each owner are from, a sentence each.
    """

    fit: Fit | None
    constants: Mapping[str, float]
    known: ConstantSpread
    software: Stack
    origins: tuple[str, ...]


def constants_for(
    cluster: Cluster, precision: str, path: Path | None = None, forced: bool = False, stack: str = ""
) -> PlanConstants:
    """The constants for a cluster. stack: a shipped fit or a file, whose stack trains.

    By default that is the stack of the file of a fit, or of a fit beside the cluster's file, and else the default one.
    Raises as `fit_for`, `DiagnosticError` (S725) for a stack that is no fit, and `RequestError` (S709) for one that is
    nowhere.
    """
    fit = fit_for(cluster, precision, path, forced)
    own = fit is not None and (path is not None or cluster.fit not in files("fits"))
    trains = fit if own and not stack else load_fit(_stack_file(stack or DEFAULT_STACK))
    assert trains is not None
    known = fit.known if fit is not None and fit.known is not None else ConstantSpread.of_priors()
    of_stack = ConstantSpread.of_fit(trains.constants, trains.triangle, "", trains.spread)
    if trains is not fit:
        known = known.with_owner("stack", of_stack)
    constants = {each.name: float(value) for each, value in zip(CONSTANTS, known.median, strict=True)}
    origins = (_device_text(cluster, fit), f"stack: {trains.name}{'' if own or stack else ', the default'}")
    return PlanConstants(fit, constants, known, software_of(trains), origins)


def software_of(fit: Fit) -> Stack:
    """The traits of the software of a fit's rows, beside the usual ones."""
    traits: dict[str, Any] = dict(fit.software)
    return replace(Stack(), **traits)


def _device_text(cluster: Cluster, fit: Fit | None) -> str:
    """Where constants of device and fabric are from; what is borrowed or at its prior is said."""
    device = cluster.device.name
    if fit is None:
        return f"device and fabric: priors, because no fit has rows of {device}"
    if device not in (*fit.devices, *fit.unseen):
        return f"device and fabric: {fit.name}, borrowed from {cluster.alike}, because no fit has rows of {device}"
    if device in fit.unseen:
        return f"device and fabric: {fit.name}, which has no rows of {device} (--force-fit)"
    return f"device and fabric: {fit.name}, with rows of {device}"


def _stack_file(name: str) -> Path:
    """Raises `RequestError` (S709) for what is neither the name of a shipped fit nor a file."""
    shipped = files("fits")
    if name in shipped:
        return shipped[name]
    if "\0" not in name and Path(name).is_file():
        return Path(name)
    help = did_you_mean(name, shipped)
    help = help if help.startswith("did") else "`schedc plan list` has the names; a file is a fit, x.fit.toml"
    raise RequestError([Diagnostic("S709", f"there is no stack `{name}`, nor a fit of that name", help=help)])
