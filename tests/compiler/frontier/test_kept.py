"""Kept orders: each is legal, within its memory, as good as its file says, and shown as `schedc check` prices it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schedc.compiler import legal_schedule
from schedc.diagnostics import CompilerBug
from schedc.frontier.found import SearchedCell
from schedc.frontier.kept import best_cells, kept_cell, kept_cells, kept_folder
from schedc.inputs import open_input, open_order
from schedc.ir.text import print_schedule
from schedc.search.split import join_backwards
from schedc.step.costs.costs import Costs
from support.commands import facts_of
from support.paths import ROOT

FILES = sorted(kept_folder().glob("*"))
COMMAND = re.compile(
    r"Found by schedc tune zb_wave -D P=(\d+) -D M=(\d+) -D w=(\d+) --memory ([\d.]+) --time \d+ --workers 1"
)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_each_kept_order_is_legal_in_its_memory_and_says_how_it_was_found(path: Path) -> None:
    cell, order = kept_cell(path, Costs()), open_order(path).schedule
    assert cell.point is not None
    found = COMMAND.fullmatch(order.doc)
    assert found is not None
    ranks, microbatches, w = map(int, found.groups()[:3])
    memory = float(found[4])
    assert path.name == f"p{ranks}_m{microbatches}_v{2 * w}_c{memory * 2 * w:g}.order"
    assert (order.ranks, order.microbatches, cell.per_rank, cell.memory) == (ranks, microbatches, 2 * w, memory)
    assert cell.point.memory <= cell.memory + 1e-9
    assert cell.bound <= cell.point.bubble + 1e-9
    assert cell.proven == (cell.point.bubble == pytest.approx(cell.bound))
    assert join_backwards(order, order, lambda _: True) is order  # its backwards are split: the floor is of these ops


@pytest.mark.slow
def test_sizes_of_kept_orders_are_those_of_pages_at_4_8_and_16_ranks() -> None:
    sizes = {path.name.split("_v")[0] for path in FILES}
    assert sizes == {"p4_m16", "p8_m32", "p16_m32"}
    cells = list(kept_cells(8, 32, Costs()))
    assert {cell.per_rank for cell in cells} == {2, 4}
    assert sum(cell.proven for cell in cells) >= 2
    assert [*kept_cells(8, 16, Costs())] == []


@pytest.mark.slow
def test_a_kept_order_is_a_point_as_check_prices_it_under_other_costs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    costs = ("--cost", "F=1.5", "--cost", "p2p=0.05")
    facts = facts_of("frontier", "-D", "P=4", "-D", "M=16", *costs)
    kept = [point for point in facts["points"] if point["kept"]]
    assert [cell["kept"] for cell in facts["searched"]] == [point["kept"] for point in kept] != []
    for point in kept:
        assert f"schedc check {point['kept']} --cost F=1.5 --cost p2p={0.05 * point['per_rank']:g}" == point["command"]
        checked, v = facts_of(*point["command"].split()[1:]), point["per_rank"]
        assert point["bubble"] * v == pytest.approx(min(checked["bubble"]))
        assert point["memory"] * v == pytest.approx(max(checked["peak_memory"]))


def test_the_better_order_of_a_cell_is_shown_with_the_larger_bound() -> None:
    (cell, *_) = kept_cells(4, 16, Costs())
    assert cell.point is not None
    worse = SearchedCell(cell.per_rank, cell.memory, cell.point._replace(bubble=cell.point.bubble + 1), 0.0, False)
    none = SearchedCell(9, 1.0, None, 0.0, False)
    assert best_cells([worse, none, cell]) == [cell, none]
    assert best_cells([cell, worse, none]) == [cell, none]


def test_a_kept_file_with_another_order_is_not_proved(tmp_path: Path) -> None:
    """Nothing of a file is trusted: the wave itself, under the name of a kept order, needs more memory than that."""
    path = tmp_path / "p4_m16_v4_c14.order"
    wave = legal_schedule(open_input("zb_wave"), {"P": 4, "M": 16, "w": 2})
    path.write_text(print_schedule(wave), encoding="utf-8")
    with pytest.raises(CompilerBug, match="exceeds 14 chunks"):
        kept_cell(path, Costs())
