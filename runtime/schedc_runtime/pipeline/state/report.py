"""Tells what a pipeline has chosen by itself and which sizes its plan leaves open; collects traces of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter_ns, time_ns
from typing import Protocol

from torch import nn

from schedc.plan import Plan
from schedc_runtime.execute.executor import Interval
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.moe.products import passed_over
from schedc_runtime.pipeline.agree.plan_fit import unsaid
from schedc_runtime.providers import TORCH
from schedc_runtime.ranks.control import ControlPlane
from schedc_runtime.stage.stage import Stage


class Told(Protocol):
    """A part of a pipeline that describes itself in words."""

    def told(self) -> str: ...


def report(modules: Iterable[nn.Module], plan: Plan) -> str:
    """One line for each MoE layer of these stage modules, and one for each size that the plan does not say.

    Lines are not repeated. The text is empty where there is no MoE layer.
    """
    layers = [pair for module in modules for pair in moe_layers(module)]
    lines = [line for pair in layers for line in (_products(*pair, plan), *_exchanges(*pair))]
    lines += unsaid(plan, layers)
    return "\n".join(dict.fromkeys(lines))


def told_graphs(stages: Iterable[Stage], steps: Told | None) -> list[str]:
    """A line for each stage whose segments replay their launches, and which whole steps are graphs."""
    of_stages = [f"stage {x.index}: {x.captures.told()}" for x in stages if x.captures is not None]
    return of_stages if steps is None else [*of_stages, steps.told()]


def _products(name: str, layer: MoELayer, plan: Plan) -> str:
    experts, padded = layer.experts, plan.capacity is not None
    case = experts.case(padded, plan.bound is None)
    chosen = experts.provider(padded, plan.bound is None)
    measured = experts.measured if experts.products.name == "auto" else None
    if measured is not None and (told := measured.told(len(experts.gate_up), case)):
        return f"{name}: products {told} ({str(case.dtype).removeprefix('torch.')} on {case.device.type})"
    reasons = "".join(f"; not {better}: {reason}" for better, reason in passed_over(experts.products, case).items())
    dtype = str(case.dtype).removeprefix("torch.")
    rows = "; rows travel in fp8" if plan.fp8_rows else ""
    return f"{name}: products {chosen.name} ({dtype} on {case.device.type}){reasons}{rows}"


def _exchanges(name: str, layer: MoELayer) -> list[str]:
    """Who carries rows, where it is not torch's transport."""
    carrier = layer.carrier
    return [] if carrier.name == TORCH else [f"{name}: exchange {carrier.name}, {carrier.facts.told()}"]


def collected_trace(control: ControlPlane, intervals: Mapping[int, Sequence[Interval]]) -> dict[int, list[Interval]]:
    """The intervals of all ranks of the first replica, in ns of one clock, by rank. A collective.

    intervals: those of the ranks here, in ns of `perf_counter_ns`.
    """
    everyone = control.gather("collecting the trace", on_one_clock(intervals))
    found: dict[int, list[Interval]] = {}
    for part in everyone:  # replicas of a rank are in order, and the first one counts
        for rank, spans in part.items():
            found.setdefault(int(rank), [Interval(*span) for span in spans])
    return found


def on_one_clock(intervals: Mapping[int, Sequence[Interval]]) -> dict[int, list[Interval]]:
    """Intervals in ns since 1970, which all processes of a machine share. intervals: in ns of `perf_counter_ns`."""
    shift = time_ns() - perf_counter_ns()

    def moved(x: Interval) -> Interval:
        copies = [copy._replace(start=copy.start + shift, end=copy.end + shift) for copy in x.copies]
        return x._replace(start=x.start + shift, end=x.end + shift, copies=copies)

    return {rank: [moved(x) for x in spans] for rank, spans in intervals.items()}
