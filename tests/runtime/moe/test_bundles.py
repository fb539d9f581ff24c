"""Rows inside a node beside copies: which travel, what is computed for each, and how they are added, beside loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from schedc_runtime.moe.bundles import relayed, rows_to_ranks
from schedc_runtime.moe.counts import Shape, ascending, counted_rows

WIDE, LOCAL, NODES, PER_NODE = 4, 2, 2, 3
RANKS = NODES * PER_NODE
PARENT = [1, 1, 0, 5, 3, 5]
"""The home of the copies of each rank, in its node."""
HOMES = torch.tensor(
    [rank if slot < LOCAL else PARENT[rank] for rank in range(RANKS) for slot in range(WIDE)] + [RANKS]
)


def placed(tokens: int, top: int, seed: int, copies: bool) -> Tensor:
    """[tokens, top] places in the order of homes, at home or where a copy is; some choices are of no expert."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(tokens):
        experts = torch.randperm(RANKS * LOCAL, generator=generator)[:top].sort().values.tolist()
        row = []
        for expert in experts:
            home, number = divmod(expert, LOCAL)
            takers = [rank for rank in range(RANKS) if PARENT[rank] == home != rank] if copies else []
            rank = [home, *takers][int(torch.randint(1 + len(takers), (), generator=generator))]
            row.append(rank * WIDE + number + LOCAL * (rank != home))
        gone = int(torch.randint(3, (), generator=generator)) == 0
        rows.append([*row[: top - gone], *[RANKS * WIDE] * gone])
    return torch.tensor(rows, dtype=torch.int16)


def rows_by_hand(ids: Tensor) -> list[list[list[list[int]]]]:
    """[tokens][homes] the rows of a token, each the choices that are computed for it."""
    tokens = []
    for row in ids.tolist():
        groups: dict[int, list[int]] = {}
        for choice, place in enumerate(row):
            if place < RANKS * WIDE:
                groups.setdefault(int(HOMES[place]), []).append(choice)
        together = [len({row[choice] // WIDE for choice in each}) == 1 for each in groups.values()]
        tokens.append(
            [[each] if whole else [[choice] for choice in each]
             for each, whole in zip(groups.values(), together, strict=True)]
        )  # fmt: skip
    return tokens


def test_without_copies_rows_are_distinct_tokens() -> None:
    ids = placed(40, 4, seed=1, copies=False)
    shape = Shape(RANKS * WIDE, NODES, PER_NODE, 0, "hierarchical")
    told = counted_rows(ascending(ids.long(), shape.experts), ids.long(), shape)
    assert torch.equal(rows_to_ranks(ids, HOMES, shape), told[shape.experts : shape.experts + RANKS])


@pytest.mark.parametrize("node", range(NODES))
@pytest.mark.parametrize(("tokens", "top"), [(60, 5), (30, 1), (0, 3)])
def test_rows_and_sums(tokens: int, top: int, node: int) -> None:
    ids = placed(tokens, top, seed=top, copies=True) if tokens else torch.zeros(0, top, dtype=torch.int16)
    shape = Shape(RANKS * WIDE, NODES, PER_NODE, node * PER_NODE + 1, "hierarchical")
    by_hand = rows_by_hand(ids)
    everyone = [0] * RANKS
    wanted: list[tuple[int, int, list[int]]] = []
    for token, homes in enumerate(by_hand):
        for choices in (choices for home in homes for choices in home):
            rank = int(ids[token, choices[0]]) // WIDE
            everyone[rank] += 1
            if rank // PER_NODE == node:
                kept = [int(p) if c in choices else RANKS * WIDE for c, p in enumerate(ids[token].tolist())]
                wanted.append((rank, token, kept))
    assert rows_to_ranks(ids, HOMES, shape).tolist() == everyone
    order = sorted(range(len(wanted)), key=lambda number: (wanted[number][0], number))
    tree, numbers = relayed(ids, HOMES, shape, len(wanted))
    assert tree.copies.at.tolist() == [wanted[number][1] for number in order]
    assert numbers.tolist() == [wanted[number][2] for number in order]
    leaves = torch.randn(len(wanted), 3, generator=torch.Generator().manual_seed(0))
    of_row = iter([leaves[order.index(number)] for number in range(len(wanted))])
    sums = torch.zeros(tokens, 3)
    for token, homes in enumerate(by_hand):
        inside = [home for home in homes if int(ids[token, home[0][0]]) // WIDE // PER_NODE == node]
        total = torch.zeros(3)
        for home in inside:
            part = torch.zeros(3)
            for _ in home:
                part = part + next(of_row)
            total = total + part
        sums[token] = total
    assert torch.equal(tree.sums(leaves), sums)
