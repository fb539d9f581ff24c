"""What tensor parallelism refuses, by name, before a rank computes anything; and what it inserts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedc
from schedc.plan import Plan
from schedc_runtime import Pipeline
from schedc_runtime.errors import BoundaryError, PartitionError, RuntimeFault
from schedc_runtime.partition import Partition, partition
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.ranks.mesh import Coordinate, Mesh
from schedc_runtime.segments import stage_graph
from schedc_runtime.tensor_parallel.exchanges import own_part
from schedc_runtime.tensor_parallel.split_model import SplitProducts
from schedc_runtime.tensor_parallel.styles import styles_of
from schedc_runtime.transport.collectives import SoloCommunicator
from support.gradient_errors import error_of
from support.needs import needs
from support.tensor_cases import SIZES, TOY_PLAN, Toy, ToyBlock, ToyMlp, loss_fn, toy


def split(
    model: nn.Module, plan: dict[str, str] | None = None, ranks: int = 2, rank: int = 0, token_slices: int = 1
) -> SplitProducts:
    """A model split over ranks that never exchange anything."""
    group = ExpertGroup(*(SoloCommunicator(name) for name in ("tensor", "rail", "node")), per_node=ranks, rank=rank)
    return SplitProducts(model, TOY_PLAN if plan is None else plan, group, token_slices=token_slices)


def cut(model: nn.Module, length: int = 8, **options: Any) -> Partition:
    tokens = torch.zeros(2, length, dtype=torch.int64)
    return partition(model, 2, example={"input_ids": tokens}, insert=split(model, **options).insertion)


@pytest.mark.parametrize(
    ("styles", "words"),
    [
        (TOY_PLAN | {"blocks.*.mlp.up": "moe_tp_experts"}, "blocks.*.mlp.up: moe_tp_experts.*does not carry out"),
        (TOY_PLAN | {"blocks.*.mlp.middle": "colwise"}, "`blocks.*.mlp.middle`, and Toy has no such module"),
        (TOY_PLAN | {"blocks.*.mlp.up.bias": "colwise"}, "the parameter `blocks.*.mlp.up.bias` .colwise."),
        (TOY_PLAN | {"blocks.*.first": "colwise"}, "splits `blocks.0.first` .colwise., a LayerNorm"),
        ({k: v for k, v in TOY_PLAN.items() if "down" not in k}, "does not close at `blocks.0.mlp.up`"),
        ({k: v for k, v in TOY_PLAN.items() if "up" not in k and "attention" not in k}, "does not close.*mlp.down"),
        (TOY_PLAN | {"norm": "embedding_rowwise"}, "splits `embedding`, `norm` as a table"),
        ({}, "Toy has no plan of styles"),
    ],
)
def test_plans_that_are_not_carried_out(styles: dict[str, str], words: str) -> None:
    with pytest.raises(RuntimeFault, match=words):
        split(toy(), styles)


def test_a_plan_of_a_family_may_name_what_a_model_lacks() -> None:
    model = toy()
    model._tp_plan = TOY_PLAN | {"blocks.*.mlp.router": "colwise_gather_output"}  # type: ignore[assignment]
    assert styles_of(model, None) == TOY_PLAN
    assert len(split(model, styles_of(model, None)).cores) == 8


@needs("transformers")
def test_expert_layers_of_transformers_are_replaced_first() -> None:
    import transformers

    config = transformers.MixtralConfig(**{**SIZES, "num_local_experts": 4})
    model = transformers.MixtralForCausalLM(config)
    with pytest.raises(
        RuntimeFault, match=r"mlp.experts.*packed_colwise.*(\n.*)*swap_experts\(model\).*one tensor rank"
    ):
        split(model, model._tp_plan)


def test_a_model_without_a_head() -> None:
    model = toy()
    model.get_output_embeddings = lambda: None  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(RuntimeFault, match="neither Toy nor the plan of styles names the head"):
        split(model, {name: style for name, style in TOY_PLAN.items() if name != "head"})


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(3, "`blocks.0.attention.query` .colwise. has 32 rows, which 3"), (8, "has 4 heads of 8, which 8 tensor ranks")],
)
def test_sizes_that_ranks_cannot_share(ranks: int, words: str) -> None:
    with pytest.raises(RuntimeFault, match=words):
        split(toy(), ranks=ranks)


def test_a_weight_is_split_once() -> None:
    model = toy()
    split(model)
    with pytest.raises(RuntimeFault, match=r"weight of `blocks.0.attention.query` is split already"):
        split(model)
    shared = toy()
    shared.blocks[1].mlp.up.weight = shared.blocks[0].mlp.up.weight  # type: ignore[union-attr]
    with pytest.raises(RuntimeFault, match=r"weight of `blocks.1.mlp.up` is split already"):
        split(shared)


def doubled(x: Tensor) -> Tensor:
    return 2.0 * x


def mixed(x: Tensor) -> Tensor:
    return x + x.mean(1, keepdim=True)


def rolled(x: Tensor) -> Tensor:
    return x.roll(1, 1)


def dropped(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5, training=True)


class Shift(nn.Module):
    """Takes each row from its neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, 1) * self.scale


def placed(x: Tensor) -> Tensor:
    return x + torch.ones(x.shape[1], 32, dtype=x.dtype)


def turned(x: Tensor) -> Tensor:
    return x[:, torch.arange(x.shape[1] - 1, -1, -1)]


def normed(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[1:])


class Positions(nn.Module):
    """Adds a value of its position to each row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 32, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class Ahead(Shift):
    """Takes each row from the next one."""

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.pad(x[:, 1:], (0, 0, 0, 1)) * self.scale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_blocks", "words"),
    [
        ({"behind": doubled}, "core `blocks.0.mlp` does not close: `blocks.0.mlp.down`"),
        ({"between": mixed}, "function `mean` may let rows of a sequence meet"),
        ({"between": rolled}, "function `roll` may let rows of a sequence meet"),
        ({"between": placed}, "function `_*i?add_*` may let rows of a sequence meet"),
        ({"between": turned}, "function `_*getitem_*` may let rows of a sequence meet"),
        ({"between": normed}, "function `layer_norm` may let rows of a sequence meet"),
        ({"between": Shift()}, "`blocks.0.between` may let rows of a sequence meet"),
        ({"between": Ahead()}, "`blocks.0.between` may let rows of a sequence meet"),
        ({"between": Positions()}, "`blocks.0.between` may let rows of a sequence meet"),
        ({"between": dropped}, "`dropout` draws random numbers"),
    ],
)
def test_blocks_that_are_not_exact_in_parts(of_blocks: dict[str, Callable[[Tensor], Tensor]], words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        cut(toy(**of_blocks))


def test_a_sequence_that_ranks_cannot_share() -> None:
    with pytest.raises(PartitionError, match="2 tensor ranks cannot share 7 rows of a sequence"):
        cut(toy(), length=7)


class Recurrent(Toy):
    """Adds the embedded tokens to what each block is given, as HRM-Text adds the state of one stack to another's."""

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded = x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x + embedded)
        logits: Tensor = self.head(self.norm(x))
        return logits


def test_whole_rows_that_meet_own_ones_are_refused_with_the_style() -> None:
    words = r"own rows from `blocks.0` \(`blocks.0.attention.query: colwise`\) on: RuntimeError: .*broadcast"
    with pytest.raises(BoundaryError, match=words) as refused:
        cut(Recurrent())
    assert "take one tensor rank" in refused.value.help


def test_slices_need_a_token_each() -> None:
    with pytest.raises(PartitionError, match="4 tokens of a tensor rank do not make 5 slices"):
        cut(toy(), token_slices=5)
    plan = Plan(slices=(2, 2), slices_of_tokens=True)
    with pytest.raises(RuntimeFault, match="`slices` of tokens in the plan, and no tensor ranks"):
        Pipeline(toy(), schedc.compile("1f1b", P=2, M=2), loss_fn=loss_fn, plan=plan, in_process=True)


class Twice(Toy):
    """Adds the table's first row between blocks, where gradients are partial sums."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x) + self.embedding.weight[0]
        logits: Tensor = self.head(self.norm(x))
        return logits


def test_a_parameter_of_both_classes() -> None:
    with pytest.raises(PartitionError, match=r"`embedding.weight` is used both where its gradient is whole"):
        cut(Twice(), plan={name: style for name, style in TOY_PLAN.items() if name != "embedding"})


class Beside(ToyMlp):
    """Adds what the table looked up, past the hidden state."""

    def forward(self, x: Tensor, looked_up: Tensor | None = None) -> Tensor:
        assert looked_up is not None
        return super().forward(x + looked_up)


class BesideBlock(ToyBlock):
    """A block with such an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.mlp: nn.Module = Beside(width)

    def forward(self, x: Tensor, looked_up: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.first(x))
        given: Tensor = x + self.mlp(self.second(x), looked_up)
        return given


class LooksUpTwice(Toy):
    """Gives the rows of the table to a core too, so that one result of it has gradients of both classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BesideBlock(32).double() for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = looked_up = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, looked_up)
        logits: Tensor = self.head(self.norm(x))
        return logits


def test_one_result_with_gradients_of_both_classes() -> None:
    with pytest.raises(PartitionError, match=r"`embedding.weight` is used both where its gradient is whole"):
        cut(LooksUpTwice(), plan=TOY_PLAN | {"embedding": "replicate"})


class Tells(Toy):
    """Returns the rows between two cores too."""

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)), x


def test_rows_between_cores_are_not_returned() -> None:
    with pytest.raises(PartitionError, match="returns something between its cores"):
        cut(Tells())


class Fused(nn.Module):
    """A gate and an `up` in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 256).double(), nn.Linear(128, 32).double()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        given: Tensor = self.down(nn.functional.silu(gate) * up)
        return given


def test_parts_that_do_not_add_up_are_refused() -> None:
    model = toy()
    for block in model.blocks:
        block.mlp = Fused()
    with pytest.raises(RuntimeFault, match=r"parts of the core `blocks.0.mlp` on 2 tensor ranks do not add up"):
        split(model)


def test_a_split_model_is_none_of_a_pipeline_without_tensor_ranks() -> None:
    model = toy()
    split(model)
    with pytest.raises(RuntimeFault, match="part of another pipeline"):
        Pipeline(model, schedc.compile("1f1b", P=2, M=2), loss_fn=nn.functional.mse_loss, in_process=True)


def test_a_split_table_that_counts_its_rows_is_refused() -> None:
    model = toy()
    model.embedding.max_norm = 1.0
    with pytest.raises(RuntimeFault, match="`embedding` has `max_norm`"):
        split(model)


def test_a_split_table_is_read_by_its_module_alone() -> None:
    with pytest.raises(PartitionError, match=r"`embedding.weight` is split .* without a call of the module"):
        cut(Twice())


@pytest.mark.parametrize("left", ["embedding", "head"])
def test_a_tied_table_is_not_half_whole(left: str) -> None:
    styles = {**TOY_PLAN, left: "replicate"}
    with pytest.raises(RuntimeFault, match=r"is tied to a weight that the plan of styles leaves whole"):
        split(toy(tied=True), styles)


def test_padding_lies_with_one_rank() -> None:
    """A token of the other half must not take the place of the padding, whose row has no gradient."""
    for rank, expected in ((0, None), (1, 8)):
        model = toy()
        model.embedding.padding_idx = 40
        split(model, rank=rank)
        assert model.embedding.padding_idx == expected


def test_parts_and_classes_of_parameters() -> None:
    model = toy()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    cut(model, rank=1)
    parts = {n for n, p in model.named_parameters() if hasattr(p, "tensor_parallel")}
    assert {name.split(".", 2)[-1] for name in parts} == {
        f"{core}.{kind}"
        for core in ("attention.query", "attention.key", "attention.value", "mlp.up")
        for kind in ("weight", "bias")
    } | {"attention.out.weight", "mlp.down.weight", "weight"}
    assert {name for name in parts if name.count(".") == 1} == {"embedding.weight", "head.weight"}
    for name, parameter in model.named_parameters():
        dim = getattr(parameter, "tensor_parallel", (None,))[0]
        expected = whole[name] if dim is None else own_part(whole[name], dim, 2, 1)
        assert torch.equal(parameter, expected), name
    complete = {n for n, p in model.named_parameters() if getattr(p, "tensor_complete", False)}
    assert complete == set()
    model = toy()
    styles = {name: style for name, style in TOY_PLAN.items() if name != "embedding"}
    cut(model, plan=styles)
    assert {n for n, p in model.named_parameters() if getattr(p, "tensor_complete", False)} == {"embedding.weight"}


def test_exchanges_lie_around_cores_and_names_are_unique() -> None:
    parts = cut(toy())
    graph = stage_graph(parts.modules[1], len(parts.values[0]))
    names = [node.name for node in graph.nodes]
    assert len(names) == len(set(names))
    assert sum(".gather." in name for name in names) == 1 + sum(".scatter." in name for name in names) == 5
    assert sum(".collect." in name for name in names) == 1
    assert not any(".enter." in name for name in names), "the region begins in the first stage"
    boundary = parts.records.first
    assert boundary is not None
    assert boundary.boundaries[1].tensors[0].shape == (2, 4, 32), "own rows alone cross between stages"


@pytest.mark.parametrize(("got", "error"), [(float("nan"), float("inf")), (3.0, 0.5), (2.0, 0.0)])
def test_a_gradient_that_is_no_number_is_an_error(got: float, error: float) -> None:
    """The bound of all parities here, which `max` over a NaN would keep."""
    layer = nn.Linear(1, 1)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    assert layer.bias.grad is not None
    layer.bias.grad.fill_(got)
    pipe: Any = SimpleNamespace(mesh=Mesh(1), places=[Coordinate(0, 0)], named_parameters=layer.named_parameters)
    assert error_of(pipe, {"weight": torch.full((1, 1), 2.0), "bias": torch.full((1,), 2.0)}) == error
