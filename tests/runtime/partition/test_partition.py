"""Partitioning: places of cuts, crossing values, and refusals."""

from __future__ import annotations

import copy
import re
from itertools import combinations_with_replacement, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from schedc.ir.placement import linear
from schedc_runtime.errors import PartitionError
from schedc_runtime.models.gpt import GPT, GPTConfig
from schedc_runtime.partition import Partition, partition
from schedc_runtime.partition.balance import balanced_split
from schedc_runtime.partition.boundary import BoundaryError, Constant, TensorSpec, infer_boundaries

WIDTH = 8


class Chain(nn.Module):
    """Embedding, equal blocks, head; ``body`` is the code between, as each test has it."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def run(parts: Partition, *values: object) -> object:
    """The results of the stages in turn, recorded for these values."""
    infer_boundaries(parts, values)
    for module in parts.modules:
        values = module(*values)
    return values


TOKENS = torch.arange(6).reshape(2, 3)


@given(
    costs=st.lists(st.integers(0, 9), max_size=7),
    stages=st.integers(1, 5),
    first=st.integers(0, 9),
    last=st.integers(0, 9),
)
@settings(max_examples=150)
def test_balance_finds_the_least_largest_stage(costs: list[int], stages: int, first: int, last: int) -> None:
    def loads(cuts: tuple[int, ...]) -> list[int]:
        bounds = [0, *cuts, len(costs)]
        out = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        out[0] += first
        out[-1] += last
        return out

    def value(cuts: tuple[int, ...]) -> tuple[int, int]:
        return max(loads(cuts)), sum(load**2 for load in loads(cuts))

    every = combinations_with_replacement(range(len(costs) + 1), stages - 1)
    assert value(tuple(balanced_split(costs, stages, first, last))) == min(map(value, every))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_compose_to_the_model_under_its_own_names(stages: int) -> None:
    model = GPT(GPTConfig(vocab=13, width=16, blocks=5, context=8))
    parts = partition(model, stages)
    names = [name for module in parts.modules for name in module.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    assert {id(p) for module in parts.modules for p in module.parameters()} == {id(p) for p in model.parameters()}
    assert [name for blocks in parts.blocks for name in blocks] == [f"blocks.{i}" for i in range(5)]
    assert {name.split(".")[0] for name in parts.modules[0].state_dict()} >= {"token_embedding", "position_embedding"}
    assert {name.split(".")[0] for name in parts.modules[-1].state_dict()} >= {"norm", "head"}
    tokens = torch.arange(16).remainder(13).reshape(2, 8)
    assert torch.equal(run(parts, tokens), model(tokens))


def test_costs_and_split_points_decide_the_cuts() -> None:
    assert partition(Chain(), 2, costs=[1, 1, 1, 5]).blocks == (("blocks.0", "blocks.1", "blocks.2"), ("blocks.3",))
    assert partition(Chain(), 2, costs=[9, 1, 1, 1, 1, 0]).blocks[0] == ()
    assert partition(Chain(), 3, split_points=["blocks.1", "blocks.3"]).blocks == (
        ("blocks.0",),
        ("blocks.1", "blocks.2"),
        ("blocks.3",),
    )


def test_the_list_of_layers_is_found_inside_a_sequence() -> None:
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])
    model = nn.Sequential(nn.Embedding(900, WIDTH), layers, nn.Linear(WIDTH, 900))
    assert partition(model, 2, costs=[1] * 4).blocks == (("1.0", "1.1"), ("1.2", "1.3"))
    assert partition(model, 3, blocks="", costs=[1, 1, 1]).blocks == (("0",), ("1",), ("2",))


class Skips(Chain):
    """A value, a size, a buffer, a flag and an input are used by several later stages; one block gives a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", torch.arange(float(WIDTH)), persistent=False)
        self.pair = Pair()

    def forward(self, x: Tensor, scale: float, extra: Tensor | None = None) -> dict[str, Tensor]:
        length = x.shape[1]
        first = self.embed(x) + self.shift
        h = self.blocks[1](self.blocks[0](first) + self.table)
        left, right = self.pair(h)
        h = self.blocks[2](left) + first * scale + self.table[:1]
        h = self.blocks[3](h / length) + right
        return {"logits": self.head(h + first), "tokens": x}


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x + 1


def test_values_travel_through_the_stages_between_and_sizes_do_not() -> None:
    model = Skips()
    parts = partition(model, 4, costs=[1, 1, 1, 1])
    result = run(parts, TOKENS, 0.5)
    expected = model(TOKENS, 0.5)
    assert isinstance(result, dict)
    assert torch.equal(result["logits"], expected["logits"])
    assert result["tokens"] is TOKENS
    assert sorted({name for m in parts.modules for name in m.state_dict()}) == sorted(model.state_dict())
    boundaries = infer_boundaries(parts, (TensorSpec((2, 3), torch.int64), 0.5))
    tokens, hidden = TensorSpec((2, 3), torch.int64), TensorSpec((2, 3, WIDTH), torch.float32, True)
    assert [b.entries for b in boundaries] == [
        (tokens, Constant(0.5)),
        (tokens, hidden, hidden),
        (tokens, hidden, hidden, hidden),
        (tokens, hidden, hidden, hidden),
        (TensorSpec((2, 3, 11), torch.float32, True), tokens),
    ]


def test_boundaries_need_no_parameters_and_ignore_freezing() -> None:
    model = Chain()
    expected = infer_boundaries(partition(model, 3), (TOKENS,))
    model.embed.requires_grad_(False)
    parts = partition(model, 3)
    parts.release_others([1])
    assert [all(p.is_meta for p in m.parameters()) for m in parts.modules] == [True, False, True]
    assert infer_boundaries(parts, (TOKENS,)) == expected
    assert [b.tensors for b in infer_boundaries(parts, (TOKENS[:1, :2],))][1] == (
        TensorSpec((1, 2, WIDTH), torch.float32, True),
    )


class Dropping(Chain):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = functional.dropout(self.embed(x), 0.5, self.training)
        if mask is not None:
            x = x * mask
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_functional_dropout_follows_the_mode() -> None:
    model = Dropping()
    model.blocks[2].eval()
    parts = partition(model, 2)
    assert model.training
    assert not model.blocks[2].training
    for module in parts.modules:
        module.eval()
    model.eval()
    assert torch.equal(run(parts, TOKENS), model(TOKENS))
    for module in parts.modules:
        module.train()
    torch.manual_seed(1)
    dropped = run(parts, TOKENS)
    torch.manual_seed(1)
    assert torch.equal(dropped, model.train()(TOKENS))
    assert not torch.equal(dropped, model.eval()(TOKENS))


def test_a_batch_may_bring_any_argument_that_the_forward_takes() -> None:
    model = Dropping().eval()
    parts = partition(model, 2)
    mask = torch.ones(2, 3, 1)
    with pytest.raises(PartitionError, match=r"was given \['masks'\], but takes \['mask', 'x'\]"):
        parts.bind((TOKENS,), {"masks": mask})
    with pytest.raises(PartitionError, match=r"0 positional arguments.*lacks \['x'\]"):
        parts.bind()
    with pytest.raises(PartitionError, match=r"(?s)takes \['x'\].*Cut\(inputs="):
        partition(model, 2, inputs=["x"]).bind((TOKENS,), {"mask": mask})
    values = parts.bind((TOKENS,), {"mask": mask})
    infer_boundaries(parts, (TOKENS,), {"mask": mask})
    for module in parts.modules:
        values = module(*values)
    assert torch.equal(values, model(TOKENS, mask))
    assert torch.equal(run(parts, TOKENS), model(TOKENS))
    with pytest.raises(BoundaryError, match=r"recorded for inputs of the shapes \[\[2, 3\]\]"):
        parts.modules[0](TOKENS[:1])


class Branching(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if x.sum() > 0:
            x = x + 1
        return self.head(x)


class TwoPaths(Chain):
    """Other operations in each mode, random numbers between blocks, an assertion on sizes."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] <= 3
        if not self.training:
            return super().forward(x) * 3
        return super().forward(x) * 2 + torch.rand(11)


def test_python_runs_for_real_in_each_mode() -> None:
    model = TwoPaths()
    parts = partition(model, 3)
    torch.manual_seed(1)
    mine = run(parts, TOKENS)
    torch.manual_seed(1)
    assert torch.equal(mine, model(TOKENS))
    for module in (*parts.modules, model):
        module.eval()
    assert torch.equal(run(parts, TOKENS), model(TOKENS))
    with pytest.raises(BoundaryError, match=r"(?s)TwoPaths fails on .*AssertionError.*assert x.shape\[1\] <= 3"):
        infer_boundaries(parts, (torch.ones(2, 4, dtype=torch.int64),))


def shared_block() -> Chain:
    model = Chain()
    model.blocks[3] = model.blocks[0]
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Branching(), r"Branching takes a branch, .* from the values .*test_partition.py:\d+: if x.sum\(\) > 0:\n"),
        (nn.DataParallel(Chain()), "the model is wrapped in DataParallel"),
        (nn.Sequential(Chain(), nn.DataParallel(Chain())), "`1` is wrapped in DataParallel"),
    ],
)
def test_models_that_cannot_be_cut_right_are_refused(model: nn.Module, says: str) -> None:
    before = set(vars(model))
    with pytest.raises(PartitionError, match=f"(?s){says}"):
        partition(model, 3)
    assert set(vars(model)) == before


def test_parameters_of_several_stages_are_told() -> None:
    (tied,) = partition(GPT(GPTConfig(tied=True)), 3).shared
    assert tied.uses == ((0, ("token_embedding.weight",)), (2, ("head.weight",)))
    for name, parameter in zip(("weight", "bias"), partition(shared_block(), 3).shared, strict=True):
        assert parameter.uses == ((0, (f"blocks.0.{name}", f"blocks.3.{name}")), (2, (f"blocks.0.{name}",)))


def test_tied_weights_in_one_stage_are_exact() -> None:
    model = GPT(GPTConfig(tied=True, blocks=2))
    (module,) = partition(model, 1).modules
    assert module.state_dict().keys() == model.state_dict().keys()
    tied = module.get_parameter("head.weight")
    assert tied is module.get_parameter("token_embedding.weight")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"split_points": ["blocks.1"]}, "1 split points make 2 stages, not 3"),
        ({"split_points": ["blocks.1", "blocks.9"]}, "`blocks.9` is not a block.*blocks.0"),
        ({"split_points": ["blocks.2", "blocks.1"]}, "not in the order.*blocks.1, blocks.2"),
        ({"costs": [1, 2]}, "2 costs for 4 blocks"),
        ({"costs": [1, 2, -1, float("nan")]}, "not all finite"),
        ({"blocks": "layers"}, "`layers` is not an nn.ModuleList.*`blocks`"),
        ({"split_points": ["blocks", "head"]}, "`blocks` is never called.*ModuleList is not run"),
        ({"inputs": ["y"]}, "takes .'x'."),
    ],
)
def test_wrong_options_say_what_is_possible(options: dict[str, object], says: str) -> None:
    with pytest.raises(PartitionError, match=f"(?s){says}"):
        partition(Chain(), 3, **options)


class Spare(Chain):
    """A module and a parameter that the forward does not use, a second name, a table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.extra = nn.Parameter(torch.ones(3))
        self.also = self.head
        self.register_buffer("table", torch.arange(11.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table


def test_unused_and_renamed_parts_stay_in_the_state_also_of_a_copy() -> None:
    model = Spare()
    parts = partition(model, 3)
    infer_boundaries(parts, (TOKENS,))
    for modules in (parts.modules, copy.deepcopy(parts.modules)):
        assert sorted(name for m in modules for name in m.state_dict()) == sorted(model.state_dict())
        assert modules[2].get_parameter("also.weight") is modules[2].get_parameter("head.weight")
        values: object = (TOKENS,)
        for module in modules:
            values = module(*values)
        assert torch.equal(values, model(TOKENS))


class Compressing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


def test_shapes_that_depend_on_data_are_refused_with_the_unit() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Compressing())
    with pytest.raises(BoundaryError, match=r"(?s)`0`: what it computes depends on the values .*return x\[x > 0\]"):
        partition(nn.Sequential(Compressing(), nn.Linear(3, 3)), 2, costs=[1, 1], example=torch.ones(2, 3).long())
    with pytest.raises(BoundaryError, match=r"`0` of Sequential fails on inputs .*\(input: float32\[2, 4\]\)"):
        partition(model, 2, costs=[1, 1], example=torch.ones(2, 4))


def test_partitioning_leaves_the_model_alone() -> None:
    model = Skips()
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    attributes = set(vars(model))
    partition(model, 4)
    assert [m.training for m in model.modules()] == modes
    assert set(vars(model)) == attributes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_partition_is_a_picture_of_stages_and_of_what_crosses() -> None:
    model = GPT(GPTConfig(vocab=32, width=8, heads=2, blocks=5, context=16))
    cut = partition(model, 3, split_points=["blocks.1", "blocks.4"])
    source = cut.graph((TensorSpec((2, 16), torch.int64),), placement=linear(3, 1)).source
    labels = dict(re.findall(r'^\t(\w+(?: -> \w+)?) \[label="(.*?)"', source, re.MULTILINE))
    block, held = (sum(p.numel() for p in module.parameters()) for module in (model.blocks[0], cut.modules[1]))
    assert labels["s1"].split(r"\l")[:2] == [
        f"stage 1 on rank 1: {held:,} parameters, {4 * held / 1000:.4g} KB",
        f"blocks.1 to blocks.3: 3 GptBlock, each {block:,} parameters, {4 * block / 1000:.4g} KB",
    ]
    assert [row.partition(":")[0] for row in labels["s2"].split(r"\l")] == [
        "stage 2 on rank 2", "blocks.4", "norm", "head", "",
    ]  # fmt: skip
    crossing = infer_boundaries(cut, (TensorSpec((2, 16), torch.int64),))[1]
    assert [row.strip() for row in labels["s0 -> s1"].split(r"\l")[:-1]] == [
        f"{crossing.names[0]}: {crossing.tensors[0]}, 1.024 KB",
        "forward 1.024 KB, backward 1.024 KB",
    ]
    assert "tokens: int64[2, 16], 256 B" in labels["input -> s0"]
    assert "output: float32[2, 16, 32], 4.096 KB" in labels["s2 -> output"]
    assert labels["input -> s0"].count(r"\l") == 1
    named = cut.graph().source
    assert crossing.names[0] in named
    assert "float32" not in named


def test_the_picture_of_a_partition_shows_constants_ties_and_empty_stages() -> None:
    source = partition(Skips(), 4, costs=[1, 1, 1, 1]).graph((TensorSpec((2, 3), torch.int64), 0.5)).source
    for row in ("0.5, the same in every microbatch", "in all 312 B", "[2, 3, 11]"):
        assert row in source
    tied = Chain(3)
    tied.blocks[2].weight = tied.blocks[1].weight
    assert f"3 stages, {sum(p.numel() for p in tied.parameters()):,} parameters" in (
        partition(tied, 3, split_points=["blocks.0", "blocks.1"]).graph().source
    )
    assert "nothing: passes on what it gets" in partition(Chain(1), 5, costs=[1]).graph().source
