"""The schedules that plans may use: what their files say of sizes, pairs, and where stages lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from schedc.diagnostics import DiagnosticError
from schedc.elaborate.evaluate import Evaluator, Scope
from schedc.elaborate.place import build_placement
from schedc.elaborate.sizes import BOUNDS, bind_sizes, lets_and_requires, meets_requirements
from schedc.elaborate.walk import in_order
from schedc.ir.placement import Placement
from schedc.load.library import names, open_schedule
from schedc.syntax import tree as t

_MOST_CHUNKS = 16
"""Values of a size among which the one is sought that gives a rank so many stages."""


@dataclass(frozen=True, eq=False)
class ScheduleChoice:
    """A schedule of the space.

    path: what `open_schedule` takes: a name of the library, or a file. shipped: whether the library has it.
    """

    tree: t.ScheduleTree
    path: str
    shipped: bool = True
    _sizes: dict[tuple[int, int, int], dict[str, int] | None] = field(default_factory=dict, repr=False)
    _limits: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict, repr=False)
    _least: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.tree.name

    @cached_property
    def has_pairs(self) -> bool:
        """Whether a forward runs in one cell with a backward."""
        pairs = ({first.kind, second.kind} for first, second in _pairs(self.tree))
        return any("F" in kinds and kinds & {"B", "I"} for kinds in pairs)

    @cached_property
    def splits(self) -> bool:
        """Whether some backward is split, so that a weight gradient may come later."""
        return any(op.kind == "I" for op in _ops(self.tree))

    @cached_property
    def by_policy(self) -> bool:
        """Whether the order depends on costs."""
        return self.tree.has_policy

    def role(self, wanted: str) -> str | None:
        """The name of the size of a role; None where the file has none."""
        return next((size.name for size in self.tree.parameters if size.role == wanted), None)

    @cached_property
    def shaping(self) -> str | None:
        """The size that decides how many stages a rank holds, beside the ranks; None where no size does."""
        in_place = {part.id for part in _nodes(self.tree.places) if isinstance(part, t.Name)}
        sizes = [size.name for size in self.tree.parameters if size.role in ("chunks", "count")]
        return next((name for name in sizes if name in in_place), self.role("chunks"))

    @cached_property
    def limiting(self) -> str | None:
        """The first size of role `count` that does not decide where stages lie: the axis `limit`."""
        counts = (size.name for size in self.tree.parameters if size.role == "count")
        return next((name for name in counts if name != self.shaping), None)

    def refusal(self) -> str:
        """Why no plan can use the schedule; empty where one can."""
        if self.role("segments"):
            return "it cuts microbatches into segments, whose times are not priced"
        if len(self.tree.places[0].pipes) > 1:
            return "it holds every stage on two ranks, whose sums of gradients are not priced"
        return ""

    def sizes(self, ranks: int, microbatches: int, chunks: int, limit: int = 0) -> dict[str, int] | None:
        """The value of every size, with ``chunks`` stages on a rank; None where there is none, `require` apart."""
        key = (ranks, microbatches, chunks)
        if key not in self._sizes:
            self._sizes[key] = self._shaped(*key)
        shaped = self._sizes[key]
        return {**shaped, self.limiting: limit} if shaped and limit and self.limiting else shaped

    def _shaped(self, ranks: int, microbatches: int, chunks: int) -> dict[str, int] | None:
        by_role = {"ranks": ranks, "microbatches": microbatches}
        given = {size.name: by_role[size.role] for size in self.tree.parameters if size.role in by_role}
        counts = [size for size in self.tree.parameters if size.role == "count" and size.name != self.shaping]
        given |= {size.name: BOUNDS["count"][0] for size in counts if size.default is None}
        values = [chunks, *range(1, min(chunks, _MOST_CHUNKS))] if self.shaping else [0]
        for value in values:
            sizes = given | ({self.shaping: value} if self.shaping else {})
            if self._stages(sizes, ranks, microbatches) == ranks * chunks:
                return sizes
        return None

    def _stages(self, sizes: dict[str, int], ranks: int, microbatches: int) -> int:
        """0 where sizes or places are not legal."""
        placement = self._placed(sizes, ranks, microbatches)
        return 0 if placement is None or placement.pipes > 1 else placement.stages

    def _placed(self, sizes: dict[str, int], ranks: int, microbatches: int) -> Placement | None:
        try:
            return build_placement(self.tree.places[0], ranks, microbatches, *self.evaluated(sizes))
        except DiagnosticError:
            return None

    def evaluated(self, sizes: dict[str, int]) -> tuple[Evaluator, Scope]:
        """What evaluates expressions of the file at these sizes, and the values of its `let`s.

        Raises `DiagnosticError` for sizes that are not legal.
        """
        bound = bind_sizes(self.tree, sizes)
        evaluator = Evaluator(self.tree.source, bound, {each.name: each for each in self.tree.functions})
        scope = Scope(1, dict(bound))
        for item in lets_and_requires(self.tree):
            if isinstance(item, t.Let):
                scope.names[item.name] = evaluator.value(item.value, scope)
        return evaluator, scope

    def placement(self, ranks: int, microbatches: int, chunks: int) -> Placement | None:
        """Where stages lie, with ``chunks`` of them on a rank; None where the file has no such placement."""
        sizes = self.sizes(ranks, microbatches, chunks)
        return None if sizes is None else self._placed(sizes, ranks, microbatches)

    def limits(self, ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
        """The legal values of the axis `limit`: the least, ranks, and twice the ranks.

        (0,) where there is no such size. Empty where the file's `require` refuses the other sizes.
        """
        key = (ranks, microbatches, chunks)
        if key not in self._limits:
            self._limits[key] = self._legal_limits(*key)
        return self._limits[key]

    def _legal_limits(self, ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
        sizes = self.sizes(ranks, microbatches, chunks)
        if sizes is None:
            return ()
        if self.limiting is None:
            return (0,) if self._meets(sizes) else ()
        name = self.limiting

        def legal(limit: int) -> bool:
            return limit > 0 and self._meets({**sizes, name: limit})

        known = self._least.get(ranks, 0)
        if not (legal(known) and not legal(known - 1)):
            known = next((limit for limit in range(1, 4 * ranks + 1) if legal(limit)), 0)
            self._least[ranks] = known
        return tuple(sorted({limit for limit in (known, ranks, 2 * ranks) if legal(limit)}))

    def _meets(self, sizes: dict[str, int]) -> bool:
        try:
            return meets_requirements(self.tree, bind_sizes(self.tree, sizes))
        except DiagnosticError:
            return False


def _nodes(value: object) -> Iterator[object]:
    """A part of a tree with all parts inside it."""
    if isinstance(value, tuple):
        for part in value:
            yield from _nodes(part)
    elif is_dataclass(value) and not isinstance(value, type):
        yield value
        for each in fields(value):
            yield from _nodes(getattr(value, each.name))


def _ops(tree: t.ScheduleTree) -> Iterator[t.OpItem]:
    return (node for node in _nodes(tree.ranks) if isinstance(node, t.OpItem))


def _pairs(tree: t.ScheduleTree) -> Iterator[tuple[t.OpItem, t.OpItem]]:
    return (in_order(node) for node in _nodes(tree.ranks) if isinstance(node, t.PairItem))


@dataclass(frozen=True)
class LeftOut:
    """A schedule that no plan of the space uses, and why."""

    schedule: str
    reason: str


@lru_cache(maxsize=64)
def open_choice(path: str) -> ScheduleChoice:
    """The schedule of a name of the library, or of a file. Raises `DiagnosticError`."""
    return ScheduleChoice(open_schedule(path), path)


def all_schedules(folder: Path | None = None) -> tuple[tuple[ScheduleChoice, ...], tuple[LeftOut, ...]]:
    """The schedules of the library, with those of the `.sched` files in a folder, and those that cannot be used.

    Raises nothing for a file that is wrong: it is left out, with its first finding as the reason.
    """
    choices = [open_choice(name) for name in names()]
    left_out: list[LeftOut] = []
    for path in sorted(folder.glob("*.sched")) if folder else ():
        try:
            own = ScheduleChoice(open_schedule(path), str(path), shipped=False)
        except DiagnosticError as error:
            left_out.append(LeftOut(path.name, error.diagnostics[0].message))
            continue
        if any(own.name == choice.name for choice in choices):
            left_out.append(LeftOut(path.name, f"another schedule has the name `{own.name}`"))
        else:
            choices.append(own)
    usable = []
    for choice in choices:
        if reason := choice.refusal() or ("" if choice.shipped else _deadlock(choice)):
            left_out.append(LeftOut(choice.name, reason))
        else:
            usable.append(choice)
    return tuple(usable), tuple(left_out)


def _deadlock(choice: ScheduleChoice) -> str:
    """What is wrong with the order of a user's schedule at the first sizes that it takes; empty for nothing."""
    from schedc.compiler import legal_schedule

    for ranks, microbatches, chunks in _TRIED:
        limits = choice.limits(ranks, microbatches, chunks)
        sizes = choice.sizes(ranks, microbatches, chunks, limits[0]) if limits else None
        if sizes is None:
            continue
        try:
            legal_schedule(choice.tree, sizes)
        except DiagnosticError as error:
            return error.diagnostics[0].message
        return ""
    return f"no size meets its `require`, among {len(_TRIED)} that were tried"


_TRIED = tuple(
    (ranks, microbatches * ranks, chunks)
    for ranks in (4, 2, 8, 3, 1)
    for microbatches in (2, 4, 3, 1)
    for chunks in (1, 2, 3, 4)
)
"""Ranks, microbatches and stages of a rank at which a user's schedule is tried."""
