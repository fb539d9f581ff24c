"""An independent simulation of a schedule: one op at a time, by names, with none of the columns."""

from __future__ import annotations

from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from support import orders


def slow_ends(schedule: Schedule, costs: Costs) -> tuple[dict[str, float], float] | None:
    """End of every op and the makespan, or None where ranks wait for each other for ever."""
    of = costs.resolved(schedule.stages)
    cells: list[list[list[object]]] = [[] for _ in range(schedule.ranks)]
    for rank in range(schedule.ranks):
        for op in schedule.ops(rank):
            if op.pair >= 0 and cells[rank] and cells[rank][-1][0].pair == op.pair:  # type: ignore[attr-defined]
                cells[rank][-1].append(op)
            else:
                cells[rank].append([op])
    end: dict[str, float] = {}
    owner: dict[str, int] = {}
    free, progress = [0.0] * schedule.ranks, True
    while progress:
        progress = False
        for rank in range(schedule.ranks):
            if not cells[rank]:
                continue
            ops = cells[rank][0]
            needed = [n for op in ops for n in orders._needs(str(op), schedule.placement)]
            if any(n not in end for n in needed):
                continue
            ready = max([free[rank], *(end[n] + of.p2p * (owner[n] != rank) for n in needed)])
            first, last = ops[0], ops[-1]
            spent = getattr(of, first.kind.name)[first.stage]  # type: ignore[attr-defined]
            if first is not last:
                full = last.kind.name == "B"  # type: ignore[attr-defined]
                f, b = of.F[first.stage], getattr(of, last.kind.name)[last.stage]  # type: ignore[attr-defined]
                whole = f + b if of.FB is None else of.FB[first.stage]  # type: ignore[attr-defined]
                deferred = of.W[last.stage] * (of.FB is not None)  # type: ignore[attr-defined]
                spent = whole if full else max(whole - deferred, f, b)
            free[rank] = ready + spent
            end |= {str(op): free[rank] for op in ops}
            owner |= {str(op): rank for op in ops}
            cells[rank].pop(0)
            progress = True
    return None if any(cells) else (end, max(free))
