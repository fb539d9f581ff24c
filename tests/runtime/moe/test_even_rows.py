"""Rows of experts made even by microbatch: as many on all ranks, the bits of the same pieces at home, and refusals."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from runtime.moe.even_cases import Case, Results, run
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.even_rows import EvenRows
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.ranks.expert_group import in_process_expert_groups
from schedc_runtime.testing import pool
from support.segmented_cases import small_moe

pytestmark = pytest.mark.slow
EXPERT = ("experts.gate_up", "experts.down")


def differing(one: Results, other: Results) -> list[str]:
    assert one.gradients.keys() == other.gradients.keys()
    names = [name for name, grad in one.gradients.items() if not torch.equal(grad, other.gradients[name])]
    return [*names, *([] if torch.equal(one.loss, other.loss) else ["loss"])]


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", {"P": 1, "M": 2}, "float64"),
        Case("zbh1", {"P": 1, "M": 2}, "float32"),
        Case("dualpipev", {"P": 1, "M": 2}, "bfloat16"),
    ],
    ids=str,
)
def test_bits(case: Case) -> None:
    """Loss and all gradients are those of the same pieces at home; all but those of experts are the plain run's."""
    plain, in_place, even = (run(case, way) for way in ("plain", "in place", "even"))
    assert max(max(rows) - min(rows) for rows in even.rows) <= 1
    assert sorted(map(sum, even.rows)) == sorted(map(sum, plain.rows))
    assert max(max(rows) - min(rows) for rows in plain.rows) > 1
    assert differing(even, in_place) == []
    others = [name for name in differing(even, plain) if not name.endswith(EXPERT)]
    assert others == []
    if case.dtype == "float64":
        for name, grad in even.gradients.items():
            torch.testing.assert_close(grad, plain.gradients[name], rtol=1e-12, atol=1e-12)


PROCESSES = [
    Case("1f1b", {"P": 1, "M": 2}, "float64"),
    Case("zbh1", {"P": 1, "M": 2}, "float32"),
    Case("dualpipev", {"P": 1, "M": 2}, "bfloat16"),
]


@pytest.mark.processes
def test_processes() -> None:
    """Copies that travel between processes give the bits of pieces at home in one process."""
    for answers in pool(4).run("runtime.moe.even_cases:parity", cases=PROCESSES, timeout=240):
        assert [answer[:2] for answer in answers] == [[True, []]] * len(PROCESSES)
        assert all(rows > 0 for *_, rows in answers)


def test_refused() -> None:
    with pytest.raises(RuntimeFault, match=r"rows within 0\.99 of the mean"):
        EvenRows(Fraction("0.99"))
    group = in_process_expert_groups(4, 4)[0]
    with pytest.raises(RuntimeFault, match="balance by microbatch, and alltoall hierarchical"):
        shard_experts(small_moe(), in_process_expert_groups(4, 2)[0], "hierarchical", even=EvenRows())
    with pytest.raises(RuntimeFault, match="balance by microbatch, and bounded sizes"):
        shard_experts(small_moe(), group, bound=1.5, even=EvenRows())
    model = small_moe()
    for _, layer in moe_layers(model):
        layer.experts.down = torch.nn.Parameter(
            layer.experts.down.detach().transpose(1, 2).contiguous().transpose(1, 2)
        )
    with pytest.raises(RuntimeFault, match="weights of experts that are stored by columns"):
        shard_experts(model, group, even=EvenRows())
