"""Answers `--what-if`: a counterfactual by name, or another schedule or size under the times that were measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from schedc.compiler import price
from schedc.diagnose.causes import Causes
from schedc.diagnose.ranking import gain_of
from schedc.diagnose.replay import Replay
from schedc.diagnostics import Diagnostic, DiagnosticError, RequestError, did_you_mean
from schedc.inputs import open_input
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.load.library import names
from schedc.step.costs.costs import Costs
from schedc.step.timeline import simulate

if TYPE_CHECKING:
    from schedc.load.library import Given

_SETTING = re.compile(r"\s*(?:(schedule)\s*=\s*([^\s,]+)|([A-Za-z_]\w*)\s*=\s*(\d{1,9}))\s*(?:,|$)")
_NOT_IN_TRACES = {
    "experts": "this trace has no rows of experts, or even ones; ask for `data = equal`",
    "snapshots": "no rank copied a piece of a state in a traced step; `schedc check --snapshot` prices pieces",
    "offloads": "no rank copied activations in a traced step",
    "cores": "only traces of `schedc run --trace` and `Pipeline.trace` say how long a thread had no core",
    "garbage": "only traces of `schedc run --trace` and `Pipeline.trace` say when garbage was collected",
}
"""What a question may ask for, and why a trace does not answer it."""
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True)
class WhatIfAnswer:
    """The answer to a question. gain: share of a step, or of the time per microbatch where their number changes.

    interval: 95 %, None where steps were not resampled. note: what was assumed.
    """

    question: str
    gain: float
    interval: tuple[float, float] | None
    note: str


def answer(question: str, replay: Replay, causes: Causes, named: Callable[[str], Given]) -> WhatIfAnswer:
    """The answer to one question. named: gives the schedule of a name, as the command line does.

    Raises `RequestError` (S619) for a question that this trace does not answer.
    """
    if settings := _settings(question):
        return _other_schedule(question, settings, replay, named)
    wanted = _SPACES.sub("", question)
    candidates = {_SPACES.sub("", each.name): each for each in causes.all(replay.parts)}
    if wanted not in candidates:
        _refuse_name(question, wanted, causes)
        return WhatIfAnswer(question, 0.0, (0.0, 0.0), "no slower than the others")
    cause = candidates[wanted]
    gain, interval = gain_of(replay, cause)
    return WhatIfAnswer(question, gain, interval, cause.why)


def _refuse_name(question: str, wanted: str, causes: Causes) -> None:
    """Raises for a name that no trace of this form has; returns for one that is in it, but no slower."""
    groups = causes.groups
    possible = {f"rank {rank} = others" for rank in range(causes.ranks)}
    possible |= {f"rank {rank} {kind} = others" for rank in range(causes.ranks) for kind in groups.kinds}
    possible |= {f"stage {stage} = others" for stage in groups.stage.tolist()}
    links = np.unique(causes.link[causes.link >= 0]).tolist()
    possible |= {f"link {link // causes.ranks}>{link % causes.ranks} = others" for link in links} | {"pauses = none"}
    possible |= {"cores = own", "garbage = none"} if causes.replay.steps.recording.interruptions else set()
    if wanted not in {_SPACES.sub("", form) for form in possible}:
        if reason := _NOT_IN_TRACES.get(wanted.partition("=")[0]):
            _refuse(f"this trace does not answer `{question}`", reason, "")
        forms = "rank 2 = others; rank 2 W = others; stage 3 = others; link 0>1 = others; data = equal; "
        forms += "experts = even; cores = own; garbage = none; pauses = none; snapshots = none; offloads = none; "
        forms += "start = together; host = 0; communication = 0; M=16; schedule=zbv, M=16"
        _refuse(f"this trace does not answer `{question}`", did_you_mean(question, possible), forms)


def _settings(question: str) -> dict[str, str]:
    """The sizes and the schedule that a question sets; empty if it is of another form."""
    result, place = {}, 0
    while place < len(question):
        match = _SETTING.match(question, place)
        if not match:
            return {}
        name, value = (match[1], match[2]) if match[1] else (match[3], match[4])
        result[name] = value
        place = match.end()
    return {} if set(result) & {"host", "communication"} else result


def _other_schedule(
    question: str, settings: dict[str, str], replay: Replay, named: Callable[[str], Given]
) -> WhatIfAnswer:
    """The time per microbatch of another schedule under the measured medians, against that of the same under them."""
    own = replay.dependencies.schedule
    name = settings.pop("schedule", "") or own.name or _shipped_name(own)
    if not name:
        message = f"`{question}` needs a schedule: this trace names none, and none of the library has its ops"
        _refuse(message, "write --what-if 'schedule=1f1b, M=16', or give --program", "")
    sizes = {key: int(value) for key, value in settings.items()}
    tree = open_input(named(name))
    parameters = {parameter.name for parameter in tree.parameters}
    if unknown := sorted(set(sizes) - parameters):
        _refuse(f"`{name}` has no size `{unknown[0]}`", did_you_mean(unknown[0], parameters), "")
    defaults = {key: value for key, value in own.sizes.items() if key in parameters}
    costs, notes = _measured_costs(replay)
    now = simulate(own, _for_stages(costs, own.stages), replay.dependencies)
    other = price(tree, defaults | sizes).schedule
    step = simulate(other, _for_stages(costs, other.stages))
    each, before = step.makespan / other.microbatches, now.makespan / own.microbatches
    if other.ranks != own.ranks:
        notes.append(f"{other.ranks} ranks for {own.ranks}")
    notes.append(f"{before:.2f} ms a microbatch now, {each:.2f} then, both by the measured medians")
    return WhatIfAnswer(question, 1 - each / before, None, "; ".join(notes))


def _shipped_name(own: Schedule) -> str:
    """The first schedule of the library that has these ops in this order, at these sizes; "" if none has."""
    for name in names():
        tree = open_input(name)
        parameters = {parameter.name for parameter in tree.parameters}
        try:
            other = price(tree, {key: value for key, value in own.sizes.items() if key in parameters}).schedule
        except DiagnosticError:  # needs other sizes
            continue
        columns = ("rank_start", "kind", "stage", "microbatch")
        if all(np.array_equal(getattr(own, column), getattr(other, column)) for column in columns):
            return name
    return ""


def _measured_costs(replay: Replay) -> tuple[dict[str, np.ndarray], list[str]]:
    """[stages] median times by kind in ms, p2p, and what was assumed."""
    known, body, notes = replay.dependencies, replay.parts.body, []
    schedule, alone = known.schedule, known.second < 0
    kind, stage = schedule.kind[known.first], schedule.stage[known.first]
    result = {}
    for op in OpKind:
        cells = [alone & (kind == op) & (stage == s) for s in range(schedule.stages)]
        times = np.array([np.median(body[:, c]) if c.any() else np.nan for c in cells])
        if not np.isnan(times).all():
            result[op.name] = np.where(np.isnan(times), np.nanmedian(times), times)
    if "F" not in result or not {"B", "I"} & set(result):
        _refuse("the trace has too few lone ops for times of stages", "ask for ranks, links or kinds", "")
    if "B" not in result:
        result["B"] = result["I"] + result["W"]
    if "I" not in result or "W" not in result:
        result["I"], result["W"] = result["B"] / 2, result["B"] / 2
        notes.append("I and W are half a B each")
    known_transits = replay.parts.transit[replay.known]
    result["p2p"] = np.array([np.median(known_transits) if known_transits.size else 0.0])
    return result, notes


def _for_stages(times: dict[str, np.ndarray], stages: int) -> Costs:
    """Costs of so many stages: the measured ones, or equal shares of their sum where the number is another."""
    values = {}
    for name in ("F", "I", "W", "B", "R"):
        if name in times:
            own = times[name]
            values[name] = tuple(own.tolist()) if own.size == stages else float(own.sum()) / stages
    return Costs(**values, p2p=float(times["p2p"][0]))  # type: ignore[arg-type]


def _refuse(message: str, help: str, forms: str) -> NoReturn:
    notes = (f"questions: {forms}",) if forms else ()
    raise RequestError([Diagnostic("S619", message, notes=notes, help=help)])
