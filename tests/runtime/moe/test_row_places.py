"""Where rows of copied experts are computed: each choice and each count, beside a loop over rows."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from schedc.step.costs.exchange import BoundedRows
from schedc_runtime.moe.bags import spread
from schedc_runtime.moe.counts import Counts, Shape, counted_choices
from schedc_runtime.moe.even_rows import CopiedExperts, Evener, EvenRows
from schedc_runtime.moe.forest import Forest, computed_rows, plan_among
from schedc_runtime.moe.trees import flat_landing, with_borrowed_apart


def routed(ranks: int, local: int, tokens: int, top: int, seed: int) -> list[Tensor]:
    """[ranks][N, k] choices that prefer some experts. The last rank has fewer tokens, and one of no expert."""
    generator = torch.Generator().manual_seed(seed)
    liked = 2 * torch.randn(ranks * local, generator=generator)
    choices = [
        (liked + torch.randn(tokens - 3 * (rank == ranks - 1), ranks * local, generator=generator))
        .topk(top).indices for rank in range(ranks)
    ]  # fmt: skip
    choices[-1][0] = -1
    return choices


def places_by_hand(
    choices: list[Tensor], local: int, slots: int, forest: Forest, copies: CopiedExperts
) -> list[Tensor]:
    """[ranks][N, k] places: rows of an expert one after the other, by source rank and token, to ranks ascending."""
    ranks, in_place = len(choices), copies.in_place
    wide = local + (local + ranks if in_place else slots)
    rows = torch.stack([(torch.cat(choices) == e).sum() for e in range(ranks * local)]).view(ranks, local)
    left = computed_rows(rows, forest).tolist()
    slot = {}
    for home, takers in enumerate(copies.pairs):
        behind = 0
        for taker, experts in enumerate(takers):
            for number, expert in enumerate(experts):
                slot[taker, home, expert] = home * wide + local + behind + number if in_place else (
                    taker * wide + local + number
                )  # fmt: skip
            behind += len(experts)
    places = [torch.full_like(part, ranks * wide) for part in choices]
    for source, part in enumerate(choices):
        for token, row in enumerate(part.tolist()):
            for choice, expert in enumerate(row):
                if expert < 0:
                    continue
                home, number = divmod(expert, local)
                rank = next(rank for rank in range(ranks) if left[rank][home][number])
                left[rank][home][number] -= 1
                at_home = home * wide + number
                places[source][token, choice] = at_home if rank == home else slot[rank, home, number]
    return places


@pytest.mark.parametrize("in_place", [False, True], ids=["copies", "in place"])
@pytest.mark.parametrize(("ranks", "local", "top", "slots"), [(4, 3, 2, 3), (3, 4, 3, 4), (2, 1, 1, 1), (3, 4, 3, 1)])
def test_rows_go_to_ranks_ascending(ranks: int, local: int, top: int, slots: int, in_place: bool) -> None:
    choices = routed(ranks, local, 40, top, seed=ranks)
    counted = [
        counted_choices(part, torch.ones(part.shape), Shape(ranks * local, 1, ranks, rank))
        for rank, part in enumerate(choices)
    ]
    table = torch.stack([told for _, told in counted])
    evener = Evener(EvenRows(Fraction(1), in_place, slots=slots), ranks)
    rows = Counts(table, Shape(ranks * local, 1, ranks)).rows.sum(0).long().view(ranks, local)
    forest, left = plan_among(rows, Fraction(1), ranks, slots)
    assert (left is None) == (slots == local)
    assert int(forest.taken.sum()) > 0
    tables = []
    for rank, (mine, _) in enumerate(counted):
        placed, counts, copies, *_ = evener.plan(mine, Counts(table, Shape(ranks * local, 1, ranks, rank)))
        assert copies is not None
        wanted = places_by_hand(choices, local, slots, forest, copies)
        assert torch.equal(placed.unsorted.long(), wanted[rank])
        assert torch.equal(placed.ids[..., 0].div(counts.shape.local, rounding_mode="floor"),
                           mine.ids[..., 0].div(local, rounding_mode="floor"))  # fmt: skip
        assert torch.equal(counts.table[:, -2:], table[:, -2:])
        tables.append(counts.rows)
        expected = torch.stack([torch.bincount(part.flatten(), minlength=counts.shape.experts + 1) for part in wanted])
        assert torch.equal(counts.rows.long(), expected[:, : counts.shape.experts])
    assert all(torch.equal(each, tables[0]) for each in tables)


def test_rows_of_copies_lie_apart_in_buffers_of_one_size() -> None:
    """Rows of three own experts begin at 0, those of two copies behind the room of the own ones; ends count alike."""
    generator = torch.Generator().manual_seed(3)
    ranks, wide, own = 3, 5, 3
    shape = Shape(ranks * wide, 1, ranks, 1, "flat", tokens=20, bounds=BoundedRows(16, 20, 20))
    rows = torch.randint(0, 4, (ranks, ranks * wide), generator=generator)
    rows[:, 9] = torch.tensor([2, 0, 3])
    counts = Counts(functional.pad(rows, (0, 2)).int(), shape)
    room = ranks * shape.block
    landing = with_borrowed_apart(flat_landing(counts, room), room, own)
    arrived = torch.full((room,), -1.0)
    for source in range(ranks):
        sent = [
            100 * expert + 10 * source + row for expert in range(wide) for row in range(rows[source, wide + expert])
        ]
        arrived[source * shape.block :][: len(sent)] = torch.tensor(sent, dtype=torch.float32)
    (placed,) = spread((landing.rows, arrived))
    ends = counts.mine.sum(0).cumsum(0)
    assert landing.ends is not None
    assert landing.ends.tolist() == [*ends[:own].tolist(), *(ends[own:] - ends[own - 1]).tolist()]
    for first, last, begin in ((0, own, 0), (own, wide, room)):
        wanted = [100 * expert + 10 * source + row for expert in range(first, last) for source in range(ranks)
                  for row in range(rows[source, wide + expert])]  # fmt: skip
        assert placed[begin : begin + room].tolist() == [*wanted, *[0.0] * (room - len(wanted))]
    back = landing.rows.sums(placed)
    assert torch.equal(back, arrived.clamp(min=0))
