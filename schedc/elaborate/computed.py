"""Expands computed orders: sorts `timed` blocks by slot, and reads the rules of `fill` and `policy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schedc.elaborate.computed_orders import has_slots
from schedc.elaborate.evaluate import RANK, Scope, Value
from schedc.elaborate.expand import ExpandedItem, Expander, InstanceOps, pack_like, unpack
from schedc.elaborate.walk import in_order
from schedc.ir.arrays import Int64, bincount, repeat
from schedc.ir.ops import PAIR_NAMES, OpKind
from schedc.ir.schedule import Schedule
from schedc.step.rules import InTurn, Limit, OpPattern, Preferred, Rule, Searched
from schedc.syntax import tree as t

_PAIRS = ", ".join(map(" & ".join, PAIR_NAMES))
_PAIRED = np.array([[f"{first.name}{second.name}" in PAIR_NAMES for second in OpKind] for first in OpKind])
"""[kinds, kinds] whether ops of two kinds are a pair in this order."""


class _SortedOps(NamedTuple):
    """Codes, slots and instances of ops, [ops] each, by instance. slots: None if some op has no slot of a value."""

    codes: Int64
    slots: Int64 | None
    instance: Int64


@dataclass(frozen=True)
class WrittenOrder:
    """The ops in the order of the text.

    rule: orders the ops of the computed order; None if they run as written.
    computed: [spans] whether the ops of an item of the text belong to the computed order.
    """

    schedule: Schedule
    rule: Rule | None
    computed: npt.NDArray[np.bool_]


@dataclass
class ComputedExpander(Expander):
    """An expander that also knows computed orders.

    choice: index of the choice of a policy that is expanded.
    rule: after expansion, the rule that orders the ops of the computed order; None if their order is as written.
    """

    choice: int = 0
    rule: Rule | None = None
    _slots: bool = False
    """Whether expansion gives the slots of the ops instead of the ops."""

    def _statement(self, statement: t.Statement, scope: Scope, phase: str) -> list[InstanceOps]:
        match statement:
            case t.SlotItem(op=op, slot=slot):
                if not self._slots:
                    return [self._op(op, scope, phase, 0)]
                value = self.evaluator.value(slot, scope)
                return [InstanceOps(np.full(scope.instances, value, np.int64) if isinstance(value, int) else value, 1)]
            case t.Timed():
                return [self._timed(statement, scope, phase)]
            case t.Policy():
                return [self._policy(statement, scope, phase)]
            case _:
                return super()._statement(statement, scope, phase)

    # ---- slots

    def _timed(self, timed: t.Timed, scope: Scope, phase: str) -> InstanceOps:
        """The ops of every rank in the order of their slots. With `fill`, a W follows every I until it is moved."""
        self.computed = timed.fill is not None
        sorted_ops = self._by_slot(timed.body, scope, phase)
        codes, slots, instance = sorted_ops.codes, sorted_ops.slots, sorted_ops.instance
        counts = bincount(instance, minlength=scope.instances)
        if slots is None:
            return InstanceOps(codes, counts)
        same = np.flatnonzero((slots[1:] == slots[:-1]) & (instance[1:] == instance[:-1]))
        if timed.pairs:
            codes = self._in_pairs(codes, slots, instance, same)
        elif same.size:
            self._collide(codes, slots, instance, int(same[0]), "an op takes its slot alone; shift one of them")
        if timed.fill is None:
            return InstanceOps(codes, counts)
        within = None if timed.fill.within is None else self.evaluator.value(timed.fill.within, scope)
        self.rule = InTurn(timed.fill.span, None if within is None else _per_rank(within, scope), timed.pairs)
        return self._with_weights(
            codes, counts, instance, ExpandedItem(OpKind.W, phase, timed.fill.span, 0, computed=True)
        )

    def _with_weights(self, codes: Int64, counts: Int64, instance: Int64, weight: ExpandedItem) -> InstanceOps:
        """The ops with a W of the same chunk and microbatch behind every I. codes, instance: [ops]."""
        self.items.append(weight)
        kinds = np.array([item.kind for item in self.items])
        split = np.flatnonzero(kinds[unpack(codes)[0]] == OpKind.I)
        added = bincount(instance[split], minlength=counts.size)
        filled = np.insert(codes, split + 1, pack_like(codes[split], len(self.items) - 1))
        self.ops += split.size
        return InstanceOps(filled, counts + added)

    def _by_slot(self, body: Sequence[t.Statement], scope: Scope, phase: str) -> _SortedOps:
        """The ops of a block in the order of their slots; in that of the text where slots are equal."""
        rows = self.body(body, scope.inside(), phase)
        computed, self.computed, self._slots = self.computed, False, True
        slots = self.body(body, scope.inside(), phase).codes
        self.computed, self._slots = computed, False
        instance = repeat(np.arange(scope.instances), rows.per_instance(scope.instances))
        if slots.size != rows.codes.size:  # an op or a slot has no value: the findings say so
            return _SortedOps(rows.codes, None, instance)
        order = np.lexsort((slots, instance))
        return _SortedOps(rows.codes[order], slots[order], instance)

    def _in_pairs(self, codes: Int64, slots: Int64, instance: Int64, same: Int64) -> Int64:
        """The codes with the two ops of each slot as a pair. Other ops that share a slot are refused (S127).

        codes, slots, instance: [ops] in the order of ranks and slots. same: rows whose slot is that of the next row.
        """
        kinds = np.array([item.kind for item in self.items], np.int64)[unpack(codes)[0]]
        first, second = kinds[same], kinds[same + 1]
        turned = _PAIRED[second, first]
        third = np.flatnonzero(np.diff(same, prepend=-2) == 1)
        strange = np.flatnonzero(~(_PAIRED[first, second] | turned))
        if third.size or strange.size:
            place = int(same[min((*third[:1], *strange[:1]))])
            self._collide(codes, slots, instance, place, f"a slot has one op or one pair: {_PAIRS}")
        swapped, paired = same[turned], codes.copy()
        paired[swapped], paired[swapped + 1] = codes[swapped + 1], codes[swapped]
        for half, rows in ((1, same), (2, same + 1)):
            items = unpack(paired[rows])[0]
            for number in np.unique(items).tolist():
                self.items.append(replace(self.items[number], half=half))
                halves = rows[items == number]
                paired[halves] = pack_like(paired[halves], len(self.items) - 1)
        return paired

    def _collide(self, codes: Int64, slots: Int64, instance: Int64, place: int, help: str) -> None:
        """Refuse (S127) the ops at ``place`` and behind it, which are of one rank and in one slot."""
        first, second = (self.items[item] for item in unpack(codes[place : place + 2])[0].tolist())
        message = f"{first.kind.name} and {second.kind.name} are both in slot {int(slots[place])}"
        self.evaluator.fail("S127", message, second.span, help=help, rank=int(instance[place]))

    # ---- policies

    def _policy(self, policy: t.Policy, scope: Scope, phase: str) -> InstanceOps:
        choice = policy.choices[self.choice]
        if choice.search is not None:
            self.rule = self._search(choice.search, scope)
        elif choice.prefer or choice.fill or choice.caps:
            preferences = tuple(self._preference(item, scope) for item in choice.prefer)
            limits = tuple(
                Limit(
                    self._pattern(cap.counted, scope),
                    None if cap.freed is None else self._pattern(cap.freed, scope),
                    _per_rank(self.evaluator.value(cap.most, scope), scope),
                )
                for cap in choice.caps
            )
            self.rule = Preferred(policy.span, preferences, limits, choice.fill is not None)
        self.computed = self.rule is not None
        if has_slots(choice.body):
            codes, _, instance = self._by_slot(choice.body, scope, phase)
            rows = InstanceOps(codes, bincount(instance, minlength=scope.instances))
        else:
            rows = self.body(choice.body, scope.inside(), phase)
        self.computed = False
        return rows

    def _search(self, search: t.Search, scope: Scope) -> Searched:
        """The rule of a `search`: the limit of each rank, and the part of an activation that its W needs."""
        most = _per_rank(self.evaluator.value(search.within, scope), scope)
        if search.kept is None or search.whole is None:
            return Searched(search.span, most, 1, 1)
        kept, whole = (set(_per_rank(self.evaluator.value(part, scope), scope)) for part in (search.kept, search.whole))
        if len(kept) > 1 or len(whole) > 1 or not 1 <= min(kept) <= min(whole):
            message = f"{min(kept)} of {min(whole)} is not a part of an activation, the same on all ranks"
            self.evaluator.fail("S126", message, search.span, help="write for example keep 3 of 8")
        return Searched(search.span, most, min(kept), min(whole))

    def _preference(self, item: t.OpItem | t.PairItem, scope: Scope) -> tuple[OpPattern, ...]:
        """The pattern of a preferred op, or the patterns of both ops of a pair."""
        ops: Sequence[t.OpItem] = (item,) if isinstance(item, t.OpItem) else in_order(item)
        return tuple(self._pattern(op, scope) for op in ops)

    def _pattern(self, op: t.OpItem, scope: Scope) -> OpPattern:
        chunk = None if op.chunk is None else _per_rank(self._chunk(op, scope), scope)
        return OpPattern(OpKind[op.kind], chunk)


def _per_rank(value: Value, scope: Scope) -> tuple[int, ...]:
    """[ranks] the value on each rank. At the top of a rank block the instances are the ranks in order."""
    ranks = np.asarray(scope.lookup(RANK))
    return tuple(np.broadcast_to(np.asarray(value, np.int64), ranks.shape).tolist())
