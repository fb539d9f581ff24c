"""Orders that are computed: `timed` blocks sorted by slot, and what `fill` and `policy` ask of the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedc.elaborate.evaluate import RANK, Scope, Value
from schedc.elaborate.expand import ExpandedItem, Expander, InstanceOps, pack_like, unpack
from schedc.elaborate.rules import InTurn, Limit, OpPattern, Preferred, Rule, Searched
from schedc.ir.arrays import bincount, repeat
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Int64
from schedc.syntax import tree as t


@dataclass
class ComputedExpander(Expander):
    """An expander that also knows computed orders. ``choice``: which choice of a policy is expanded.

    rule: afterwards, how the ops of the computed order find their places; None if they stand as written.
    """

    choice: int = 0
    rule: Rule | None = None
    _slots: bool = False
    """Whether the rows made are the slots of ops, and not the ops."""

    def _statement(self, statement: t.Statement, scope: Scope, phase: str) -> list[InstanceOps]:
        match statement:
            case t.SlotItem(op=op, slot=slot):
                if not self._slots:
                    return [self._op(op, scope, phase, 0)]
                value = self.evaluator.value(slot, scope)
                return [InstanceOps(np.full(scope.lanes, value, np.int64) if isinstance(value, int) else value, 1)]
            case t.Timed():
                return [self._timed(statement, scope, phase)]
            case t.Policy():
                return [self._policy(statement, scope, phase)]
            case _:
                return super()._statement(statement, scope, phase)

    # ---- slots

    def _timed(self, timed: t.Timed, scope: Scope, phase: str) -> InstanceOps:
        """The ops of every rank by slot; where they are filled up, a W behind every I for the dispatcher to move."""
        self.computed = timed.fill is not None
        rows = self.body(timed.body, scope.inside(), phase)
        self.computed, self._slots = False, True
        slots = self.body(timed.body, scope.inside(), phase).codes
        self._slots = False
        counts = rows.per_lane(scope.lanes)
        if slots.size != rows.codes.size:  # an op or a slot has no value, which is among the findings
            return InstanceOps(rows.codes, counts)
        lane = repeat(np.arange(scope.lanes), counts)
        order = np.lexsort((slots, lane))
        self._collisions(rows.codes[order], slots[order], lane)
        codes = rows.codes[order]
        if timed.fill is None:
            return InstanceOps(codes, counts)
        within = None if timed.fill.within is None else self.evaluator.value(timed.fill.within, scope)
        self.rule = InTurn(timed.fill.span, None if within is None else _per_rank(within, scope))
        return self._with_weights(codes, counts, lane, ExpandedItem(OpKind.W, phase, timed.fill.span, 0, computed=True))

    def _with_weights(self, codes: Int64, counts: Int64, lane: Int64, weight: ExpandedItem) -> InstanceOps:
        """A W of the same chunk and microbatch behind every I."""
        self.items.append(weight)
        kinds = np.array([item.kind for item in self.items])
        split = np.flatnonzero(kinds[unpack(codes)[0]] == OpKind.I)
        added = bincount(lane[split], minlength=counts.size)
        filled = np.insert(codes, split + 1, pack_like(codes[split], len(self.items) - 1))
        self.rows += split.size
        return InstanceOps(filled, counts + added)

    def _collisions(self, codes: Int64, slots: Int64, lane: Int64) -> None:
        """Refuse two ops of one rank in one slot; reported at the second, for the first slot that has two."""
        same = np.flatnonzero((slots[1:] == slots[:-1]) & (lane[1:] == lane[:-1]))
        if same.size:
            first, second = (self.items[item] for item in unpack(codes[same[0] : same[0] + 2])[0].tolist())
            slot, rank = int(slots[same[0]]), int(lane[same[0]])
            message = f"{first.kind.name} and {second.kind.name} are both in slot {slot}"
            help = "an op takes its slot alone; shift one of them"
            self.evaluator.fail("S127", message, second.span, help=help, rank=rank)

    # ---- policies

    def _policy(self, policy: t.Policy, scope: Scope, phase: str) -> InstanceOps:
        choice = policy.choices[self.choice]
        if choice.search is not None:
            self.rule = self._search(choice.search, scope)
        elif choice.prefer or choice.fill or choice.caps:
            wishes = tuple(self._wish(wish, scope) for wish in choice.prefer)
            limits = tuple(
                Limit(
                    self._mark(cap.counted, scope),
                    None if cap.freed is None else self._mark(cap.freed, scope),
                    _per_rank(self.evaluator.value(cap.most, scope), scope),
                )
                for cap in choice.caps
            )
            self.rule = Preferred(policy.span, wishes, limits, choice.fill is not None)
        self.computed = self.rule is not None
        rows = self.body(choice.body, scope.inside(), phase)
        self.computed = False
        return rows

    def _search(self, search: t.Search, scope: Scope) -> Searched:
        """The limit of each rank, and how much of an activation is kept, which is the same on all ranks."""
        most = _per_rank(self.evaluator.value(search.within, scope), scope)
        if search.kept is None or search.whole is None:
            return Searched(search.span, most, 1, 1)
        kept, whole = (set(_per_rank(self.evaluator.value(part, scope), scope)) for part in (search.kept, search.whole))
        if len(kept) > 1 or len(whole) > 1 or not 1 <= min(kept) <= min(whole):
            message = f"{min(kept)} of {min(whole)} is not a part of an activation, the same on all ranks"
            self.evaluator.fail("S126", message, search.span, help="write for example keep 3 of 8")
        return Searched(search.span, most, min(kept), min(whole))

    def _wish(self, wish: t.OpItem | t.PairItem, scope: Scope) -> tuple[OpPattern, ...]:
        """One preferred op, or the forward and the backward of a pair."""
        ops: Sequence[t.OpItem] = (wish,) if isinstance(wish, t.OpItem) else (wish.first, wish.second)
        return tuple(self._mark(op, scope) for op in sorted(ops, key=lambda op: op.kind != "F"))

    def _mark(self, op: t.OpItem, scope: Scope) -> OpPattern:
        chunk = None if op.chunk is None else _per_rank(self._chunk(op, scope), scope)
        return OpPattern(OpKind[op.kind], chunk)


def _per_rank(value: Value, scope: Scope) -> tuple[int, ...]:
    """The value for each rank; the lanes at the top of a rank block are the ranks in order."""
    ranks = np.asarray(scope.lookup(RANK))
    return tuple(np.broadcast_to(np.asarray(value, np.int64), ranks.shape).tolist())
