"""The loss of own columns of the logits on real ranks. `benchmarks/tensor.py vocabulary` has more families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from schedc_runtime.errors import PartitionError, RuntimeFault
from schedc_runtime.partition import partition
from schedc_runtime.pipeline.build.chunked_loss import ChunkedLoss, by_columns
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.tensor_parallel.split_model import SplitProducts
from schedc_runtime.testing import pool
from schedc_runtime.transport.collectives import SoloCommunicator
from support.needs import needs
from support.sweeps import in_sweeps, swept
from support.tensor_cases import TOY_PLAN, Toy, batch, toy
from support.vocabulary_cases import CHUNK

CASES = "support.vocabulary_cases"
NAMES = ["dualpipev tied again", "zbh1 tied early whole"]
NAMES += swept(["zbh1 again", "1f1b tied early", "dualpipe early"], [])


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return pool(4).run(f"{CASES}:toys", timeout=240, names=NAMES)


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("case", NAMES)
def test_loss_gradients_and_logits_are_those_of_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    assert max(rank[case]["error"] for rank in ranks) <= 1e-14
    assert all(rank[case]["equal"] for rank in ranks), "every order of a cell has the same bits"


@pytest.mark.processes
@pytest.mark.slow
def test_a_loss_that_differs_between_ranks_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("loss in chunks" in rank["refused"] for rank in ranks)


@in_sweeps("test_loss_gradients_and_logits_are_those_of_one_process")
@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_models_of_transformers_by_vocabulary() -> None:
    """Layers of both kinds; tied tables with one form of the loss, and tables of their own with the other."""
    sizes: dict[str, Any] = {"names": ["gemma2"], "schedules": ["zbh1"], "num_hidden_layers": 2}
    for cases in pool(4).run(f"{CASES}:families", timeout=240, **sizes):
        assert [(case["tied"], case["form"]) for case in cases] == [(False, "early"), (True, "again")]
        assert all(case["error"] <= 1e-14 and case["equal"] for case in cases), cases
        assert all(case["logits"] in ([0, 0], [CHUNK, 40]) for case in cases), "own columns of a chunk alone"


def split(model: Toy, head: str = "head", styles: dict[str, str] | None = None) -> SplitProducts:
    group = ExpertGroup(*(SoloCommunicator(name) for name in ("tensor", "rail", "node")), per_node=2, rank=1)
    return SplitProducts(model, styles or TOY_PLAN, group, head)


@pytest.mark.parametrize("head", ["", "head"])
def test_logits_are_collected_unless_the_loss_takes_own_columns(head: str) -> None:
    model = toy()
    parts = partition(model, 2, example={"input_ids": batch()[0]}, insert=split(model, head).insertion, head=head)
    modules = [name for name, _ in parts.modules[-1].named_modules()]
    assert any(name.endswith(".collect") for name in modules) == (not head)
    assert any(name.endswith("head.gather") for name in modules), "rows are whole in front of the head"
    assert not any(getattr(parameter, "tensor_complete", False) for parameter in model.parameters())


class Scaled(Toy):
    """Scales its logits by a parameter, whose gradient would be a part of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, input_ids: Any) -> Any:
        return super().forward(input_ids) * self.scale[0]


def test_what_the_loss_of_own_columns_does_not_serve_is_refused() -> None:
    with pytest.raises(RuntimeFault, match=r"the loss multiplies by `norm`, and own rows .* end at the head `head`"):
        split(toy(), "norm")
    library = ChunkedLoss("head", library=lambda *given: (given[0], given[0]))
    with pytest.raises(RuntimeFault, match="a library computes the loss of whole logits"):
        by_columns(library, split(toy()))
    model = Scaled()
    with pytest.raises(PartitionError, match="the model uses the logits of `head` elsewhere"):
        partition(model, 2, example={"input_ids": batch()[0]}, insert=split(model).insertion, head="head")


def test_a_whole_head_keeps_the_loss_of_whole_logits() -> None:
    model = toy()
    whole = split(model, styles=TOY_PLAN | {"head": "replicate", "embedding": "replicate"})
    assert by_columns(ChunkedLoss("head"), whole).columns is None  # type: ignore[union-attr]
    parts = partition(model, 2, example={"input_ids": batch()[0]}, insert=whole.insertion, head="head")
    assert any(name.endswith("model.collect") for name, _ in parts.modules[-1].named_modules())
