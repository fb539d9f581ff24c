"""torch's own pipeline runtime trains with what we export, at both levels, with the gradients of plain autograd."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedc.compiler import compile_at, legal_schedule
from schedc.interchange.refusals import foreign_op
from schedc.interchange.torch_csv import to_torch_csv
from schedc.interchange.torch_lowered import to_lowered_csv
from schedc.load.library import names, open_schedule
from schedc_runtime.testing import pool
from support.needs import needed
from support.sweeps import in_sweeps, swept

CASES = [
    ("1f1b", {"P": 2, "M": 5}),
    ("interleaved_1f1b", {"P": 2, "M": 4, "v": 2}),
    ("zbh1", {"P": 2, "M": 4}),
    ("zbv", {"P": 2, "M": 5}),
    ("dualpipev", {"P": 2, "M": 5}),
    ("zb_wave", {"P": 2, "M": 4, "w": 1}),
    ("zb_wave_odd", {"P": 2, "M": 2}),
]


@pytest.fixture(scope="module", autouse=True)
def _pipelining() -> None:
    """Loads torch's pipelines where a test runs, not where tests are collected: that takes a second."""
    needed("torch.distributed.pipelining")


@pytest.mark.processes
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=[name for name, _ in CASES])
def test_both_levels_run_unchanged_with_bitwise_equal_gradients(
    name: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    from compiler.interchange.torch_cases import plain  # which loads torch's pipelines

    schedule = legal_schedule(open_schedule(name), sizes)
    texts = {"compute_only": to_torch_csv(schedule), "compute_comms": to_lowered_csv(compile_at(name, sizes))}
    expected = plain(schedule.stages, schedule.microbatches)
    home = schedule.placement.rank_of_stage[0].tolist()
    for level, text in texts.items():
        path = tmp_path / f"{level}.csv"
        path.write_text(text)
        ranks = pool(2).run(
            "compiler.interchange.torch_cases:run_csv",
            path=str(path),
            level=level,
            home=home,
            microbatches=schedule.microbatches,
        )
        assert {key: value for grads in ranks for key, value in grads.items()} == expected, level


def is_lowered(name: str, sizes: dict[str, int]) -> bool:
    """Whether the lowered CSV can express a schedule.

    Such a schedule has neither two directions, nor segments of a sequence, nor an op or a pair that torch lacks.
    """
    tree = open_schedule(name)
    segmented = any(parameter.role == "segments" for parameter in tree.parameters)
    return not segmented and tree.places[0].form != "pipes" and not foreign_op(legal_schedule(tree, sizes))


KINDS = ("eager_1f1b", "hanayo", "looped_bfs", "vmin", "zb_auto", "zbh1_late", "dualpipev")
"""One schedule of each way to place stages, and of each order of B, of I and W, and of pairs."""


@in_sweeps("test_both_levels_run_unchanged_with_bitwise_equal_gradients")
@pytest.mark.sweep
@pytest.mark.processes
def test_every_lowered_order_gives_the_gradients_of_our_runtime(tmp_path: Path) -> None:
    """Weights, biases and norms, bit by bit, where W comes in another order than I (`zbh1_late`), too."""
    sizes = {"P": 4, "M": 8}
    lowered = {name for name in names() if is_lowered(name, sizes)}
    assert len(lowered) >= 19
    assert lowered >= set(KINDS)
    chosen = swept(sorted(lowered), sorted(KINDS)[::2])
    ranks = pool(4).run(
        "compiler.interchange.torch_cases:unlike_ours", names=chosen, sizes=sizes, folder=str(tmp_path), timeout=120
    )
    for differing in ranks:
        assert differing.keys() == set(chosen)
        assert {name: keys for name, (keys, _) in differing.items() if keys} == {}
        assert all(count % 6 == 0 and count > 0 for _, count in differing.values())
