"""What a plan's directives contradict in each other, and in the schedule and the layers that they are attached to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

import numpy as np

from schedc.diagnostics import Diagnostic, Label
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.layout.parts import DECODER, Layout, PartKind
from schedc.plan.directives import Directives
from schedc.plan.units import bytes_of
from schedc.plan.values import Attachments, By, Level
from schedc.syntax.plan import LayersLine, LayoutLine, PlanTree, SettingLine, TableLine


def check_directives(found: Directives) -> list[Diagnostic]:
    """The findings of the lines, and of the lines beside each other, before any size is known."""
    for check in _CHECKS:
        check(found)
    return sorted(found.findings, key=lambda finding: finding.primary.span)


def _experts_divide(found: Directives) -> None:
    experts, topology = found.plan.experts, found.plan.topology
    if experts and topology and experts.count % topology.ranks:
        message = f"{experts.count} experts on {topology.ranks} ranks"
        found.fault(
            "S145", message, found.span("topology"), "every rank holds equally many: take ranks that divide them"
        )


def _hot_fits(found: Directives) -> None:
    hot, experts, topology = found.plan.hot, found.plan.experts, found.plan.topology
    if hot is None or hot.most is None:
        return
    if hot.most == 0:
        found.fault("S151", "no hot expert", found.span("hot"), "leave the line out, or write `hot auto`")
    elif experts and hot.most > (slots := experts.count // (topology.ranks if topology else 1)) > 0:
        message = (
            f"{hot.most} hot experts, and each rank has {slots} of its own"
            if topology
            else (f"{hot.most} hot experts of {slots}")
        )
        help = f"a rank has a slot for a hot expert beside each of its own: write `hot {slots}`, or fewer"
        found.fault("S151", message, found.span("hot"), help)


def _capacity_holds(found: Directives) -> None:
    if (fault := capacity_fault(found.plan)) is not None:
        found.fault("S152", fault[0], found.span("capacity"), fault[1])


def capacity_fault(plan: Attachments) -> tuple[str, str] | None:
    """What is wrong with the capacity of a plan, and what to do; None where nothing is known to be."""
    capacity, experts, tokens = plan.capacity, plan.experts, plan.tokens
    if capacity is None:
        return None
    if not 0 < capacity.factor < inf:
        return f"a capacity of {capacity.factor:g}", "1 takes the mean number of rows, 1.25 a quarter more"
    if experts and tokens and (room := tokens * experts.top / experts.count * capacity.factor) < 1:
        least = experts.count / (tokens * experts.top)
        return (
            f"a capacity of {room:.3g} tokens: {tokens} tokens, top {experts.top} of {experts.count} experts",
            f"take a factor from {_up(least):g}, more tokens in a microbatch, or no capacity",
        )
    return None


def _up(number: float) -> float:
    return float(np.ceil(number * 100) / 100)


def _decided_together(found: Directives) -> None:
    """A rank alone must not start a collective again: the others of its group would not answer."""
    topology = found.plan.topology
    if topology is not None and topology.ranks == 1:
        return
    for request in found.requests:
        recompute = request.recompute
        if recompute.adaptive is not None and recompute.by is By.RANK and recompute.level.exchanges:
            message = f"each rank decides for itself about a region with collectives: `{recompute.level}` has them"
            help = (
                f"write `{recompute.level} adaptive({recompute.adaptive:g}) by group`, "
                f"or `{Level.MEDIUM} adaptive({recompute.adaptive:g})`, which holds none"
            )
            notes = ("a rank that dispatches again in backward waits for ranks that do not: the group would hang",)
            found.fault("S150", message, request.span, help, notes)


def _cells_overlap(found: Directives) -> None:
    lines = [line for line in found.tree.lines if isinstance(line, SettingLine) and line.setting == "overlap"]
    if "cell" in found.spans and any(line.value.text == "off" for line in lines):
        found.fault("S144", "the order of a cell, and `overlap off`", found.span("overlap"), "leave one of the two out")


def _units_agree(found: Directives) -> None:
    """Memory is in bytes everywhere in a plan, or nowhere; times have no unit."""
    memory = found.tree.memory
    if memory and memory.unit and bytes_of(1, memory.unit) is None:
        found.fault(
            "S146", f"`{memory.unit}` is no unit of memory", memory.span, "write KB, MB, GB or TB, or KiB to TiB"
        )
        return
    tables = [line for line in found.tree.lines if isinstance(line, TableLine)]
    for table, entry in [(line.table, entry) for line in tables for entry in line.entries]:
        if entry.unit and (table == "costs" or bytes_of(1, entry.unit) is None):
            help = "costs are times in any one unit" if table == "costs" else "memory is in KB to TB"
            found.fault("S146", f"`{entry.unit}` in `{table}`", entry.span, help)
        elif memory and table != "costs" and bool(entry.unit) != bool(memory.unit) and entry.value:
            with_unit, without = ("it", "the memory") if entry.unit else ("the memory", "it")
            message = f"`{entry.name}` and the memory: {with_unit} is in bytes, {without} is not"
            found.fault("S146", message, entry.span, "give units to both, or to neither")


_CHECKS: tuple[Callable[[Directives], None], ...] = (
    _experts_divide,
    _hot_fits,
    _capacity_holds,
    _decided_together,
    _cells_overlap,
    _units_agree,
)


# ---- beside a schedule and its layers


def padded_pairs(found: Directives, schedule: Schedule, layout: Layout) -> Iterator[Diagnostic]:
    """S148: a stage without layers in a pair that is to be overlapped."""
    pairs = np.flatnonzero(schedule.pair >= 0)
    if not found.plan.overlap or not pairs.size:
        return
    kinds = list(PartKind)
    layers = layout.counts[:, [kinds.index(kind) for kind in (*DECODER, PartKind.MTP)]].sum(1)
    empty = pairs[layers[schedule.stage[pairs]] == 0]
    if not empty.size:
        return
    row = int(empty[0])
    stage = int(schedule.stage[row])
    line = next(line for line in found.tree.lines if isinstance(line, LayersLine | LayoutLine))
    word = "overlap" if "overlap" in found.spans else "cell"
    count = len(np.unique(schedule.pair[empty]))
    yield Diagnostic(
        "S148",
        f"stage {stage} holds no layer, and pairs need one there",
        Label(line.span, f"leaves stage {stage} without a layer"),
        (Label(found.span(word), "pairs are to be overlapped"),),
        notes=(
            f"{count} pairs, the first with {schedule.describe(row)}: with nothing in it, nothing is hidden behind it",
        ),
        help="put a layer there (`at last` and `at [..]` say where paddings are), or leave `overlap` out",
        source=found.tree.source,
    )


def unused_orders(found: Directives, schedule: Schedule) -> Iterator[Diagnostic]:
    """S147: an order for a kind of pair that the schedule does not have: it would be taken for one that is run."""
    there = {f"F{OpKind(kind).name}" for kind in np.unique(schedule.kind[schedule.pair >= 0]).tolist()}
    for cell in found.plan.cells:
        if cell.kind not in there:
            pairs = [" & ".join(kind) for kind in ("FB", "FI") if kind in there]
            yield Diagnostic(
                "S147",
                f"an order for pairs {' & '.join(cell.kind)}, and the schedule has none",
                Label(found.span(f"cell {cell.kind}")),
                help=f"its pairs are {' and '.join(pairs)}" if pairs else "it has no pairs: leave the order out",
                source=found.tree.source,
            )


def experts_have_layers(found: Directives, layout: Layout) -> Iterator[Diagnostic]:
    """S145: experts, and no layer that has any."""
    if found.plan.experts and not layout.total(PartKind.MOE) and not layout.total(PartKind.MTP):
        yield Diagnostic(
            "S145",
            "experts, and all layers are dense",
            Label(found.span("experts")),
            help="say fewer `dense` layers, or leave out the line and those that speak of experts",
            source=found.tree.source,
        )


def memory_is_said(tree: PlanTree, layout: Layout, known: set[str]) -> Iterator[Diagnostic]:
    """S146: the memory is in bytes, and of a kind of layer that there is nothing says what it holds.

    known: kinds whose activations are said, or follow from the experts.
    """
    memory = tree.memory
    if memory is None or not memory.unit:
        return
    missing = [kind for kind in (*DECODER, PartKind.MTP) if layout.total(kind) and str(kind) not in known]
    if missing:
        message = f"the memory is in bytes, and what a {missing[0]} layer holds is not known"
        help = f"write `activations {missing[0]} 400 MB`"
        more = "; of MoE layers it follows from `experts ... width F hidden H` and `tokens`"
        yield Diagnostic("S146", message, Label(memory.span), help=help + more, source=tree.source)
