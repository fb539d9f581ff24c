"""Cases of tensor parallelism on real ranks: models of Transformers and toys, against plain autograd."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha256
from itertools import cycle, islice, pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import schedc
from schedc.ir.program import Program
from schedc.plan import Plan
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.stage.split import SplitBackward
from schedc_runtime.trainers import checkpoint
from support.cell_orders import digest, in_each_order
from support.gradient_errors import error_of
from support.short_search import search_shortly_on_ranks
from support.wide_models import WideModel, on_rank_0, steady
from support.wide_numbers import narrow

search_shortly_on_ranks()
FAMILIES: dict[str, dict[str, Any]] = {
    name: {}
    for name in (
        "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mistral", "olmo2", "cohere2", "glm4",
        "starcoder2", "granite", "smollm3", "ernie4_5", "helium", "exaone4", "nemotron", "seed_oss",
    )
}  # fmt: skip
"""Dense families, with what their tiny configurations have besides `SIZES`."""
FAMILIES["seed_oss"] = {"residual_dropout": 0.0}
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0, "use_cache": False, "initializer_range": 0.1,
}  # fmt: skip
SCHEDULES: dict[str, dict[str, int]] = {
    "1f1b": {"M": 4},
    "zbh1": {"M": 4},
    "dualpipev": {"M": 4},
    "interleaved_overlap": {"M": 4, "v": 2},
}
"""By name: sizes besides P = 2."""
ROWS, LENGTH = 8, 8


def family(name: str, seed: int = 0, **sizes: Any) -> nn.Module:
    """A tiny model of a family in float64, the same on every rank; norms have weights that differ."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **{**SIZES, **FAMILIES.get(name, {}), "tie_word_embeddings": False, **sizes})
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def loss_fn(output: Any, labels: Tensor) -> Tensor:
    """[] the mean loss of the next tokens. labels: [rows, S]."""
    logits = output if isinstance(output, Tensor) else output["logits"]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """[rows, S] tokens and labels."""
    generator = torch.Generator().manual_seed(7 + step)
    tokens, labels = (torch.randint(3, 64, (ROWS, LENGTH), generator=generator) for _ in range(2))
    return tokens, labels


@contextmanager
def wide_norms() -> Iterator[None]:
    """Leaves out the casts of norms and softmaxes to float32, which would round what is compared in float64."""
    plain_to, plain_float, plain_softmax = Tensor.to, Tensor.float, nn.functional.softmax

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        narrow = torch.float32 in (*args, *kwargs.values())
        return self if narrow and self.dtype is torch.float64 else plain_to(self, *args, **kwargs)

    def to_float(self: Tensor) -> Tensor:
        return self if self.dtype is torch.float64 else plain_float(self)

    def softmax(self: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return plain_softmax(self, *args, dtype=None if self.dtype is torch.float64 else dtype, **kwargs)

    with ExitStack() as patches:
        for owner, name, own in (
            (Tensor, "to", to), (Tensor, "float", to_float), (nn.functional, "softmax", softmax),
        ):  # fmt: skip
            patches.enter_context(mock.patch.object(owner, name, own))
        yield


@on_rank_0
def reference(
    model: nn.Module, tokens: Tensor, labels: Tensor, microbatches: int, wide: bool = True
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients [...] of one process with plain autograd, microbatch by microbatch. wide: in long doubles."""
    whole = WideModel(model, wide)
    total = 0.0
    for part, expected in zip(tokens.chunk(microbatches), labels.chunk(microbatches), strict=True):
        loss = loss_fn(whole(input_ids=part), expected) / microbatches
        loss.backward()
        total += narrow(loss).item()
    return total, whole.gradients()


def families(
    rank: int,
    world: int,
    names: Sequence[str],
    schedules: Sequence[str],
    tensor: int = 2,
    token_slices: Sequence[int] = (),
    **sizes: Any,
) -> list[dict[str, Any]]:
    """A case for each family and schedule: errors of loss and gradients, and whether all orders of a cell agree.

    token_slices: slices of tokens in the stages, in turns. Microbatches then have one row.
    seed, rounding: as of `steady`.
    """
    cases = []
    layers = max(SIZES["num_hidden_layers"], *[_compiled(each).stages for each in schedules])
    for name in names:
        of_seed = partial(family, name, **{"num_hidden_layers": layers, **sizes})
        with wide_norms():
            rows = batch() if not token_slices else tuple(each[:4] for each in batch())
            seed, rounding, expected = steady(of_seed, lambda model, wide, rows=rows: reference(model, *rows, 4, wide))
            for schedule in schedules:
                row = {"family": name, "schedule": schedule, "seed": seed, "rounding": rounding}
                cases.append(row | _case(of_seed(seed), schedule, tensor, rows, expected, token_slices))
    return cases


def _compiled(schedule: str) -> Program:
    return schedc.compile(schedule, P=2, **SCHEDULES.get(schedule, {"M": 4}))


def _case(
    model: nn.Module,
    schedule: str,
    tensor: int,
    rows: tuple[Tensor, ...],
    expected: tuple[float, Mapping[str, Tensor]],
    token_slices: Sequence[int],
) -> dict[str, Any]:
    program, (tokens, labels), (loss, gradients) = _compiled(schedule), rows, expected
    errors, bits = [], set()
    slices = tuple(islice(cycle(token_slices), program.stages))
    pipe = Pipeline(
        model, program, loss_fn=loss_fn, mesh=Mesh(2, tensor=tensor), timeout=60.0,
        example={"input_ids": tokens[: len(tokens) // 4]}, plan=Plan(slices=slices, slices_of_tokens=bool(slices)),
    )  # fmt: skip
    for _ in in_each_order(pipe):
        got = pipe.step({"input_ids": tokens}, labels).item()
        errors.append(max(error_of(pipe, gradients), abs(got - loss) / loss))
        bits.add(digest(pipe))
    pipe.close()
    return {"error": max(errors), "equal": len(bits) == 1}


class ToyAttention(nn.Module):
    """Causal attention [batch, S, width] of heads of 8. bias: of the last product."""

    head_dim = 8

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=True) for _ in range(3))
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1]
        q, k, v = (each(x).view(*rows, -1, 8).transpose(1, 2) for each in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        given: Tensor = self.out(mixed.transpose(1, 2).reshape(*rows, -1))
        return given


class ToyMlp(nn.Module):
    """[batch, S, width] to the same. behind: applied to the result of the last product."""

    def __init__(self, width: int, behind: Any = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return given if self.behind is None else self.behind(given)


class ToyBlock(nn.Module):
    """Attention and MLP around residual connections. between: applied to the rows between the two."""

    def __init__(self, width: int, behind: Any = None, between: Any = None) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = ToyAttention(width, bias=True), ToyMlp(width, behind)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        if self.between is not None:
            x = self.between(x)
        given: Tensor = x + self.mlp(self.second(x))
        return given


class Toy(nn.Module):
    """A language model [batch, S] to [batch, S, 64] in float64. tied: head and embedding have one table."""

    def __init__(self, blocks: int = 4, width: int = 32, tied: bool = False, **of_blocks: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.ModuleList([ToyBlock(width, **of_blocks) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


TOY_PLAN = {
    "blocks.*.attention.query": "colwise", "blocks.*.attention.key": "colwise", "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise",
    "embedding": "embedding_rowwise", "head": "colwise_gather_output",
}  # fmt: skip


def toy(**options: Any) -> Toy:
    """A `Toy`, the same on every rank."""
    torch.manual_seed(0)
    return Toy(**options)


def toys(rank: int, world: int) -> dict[str, Any]:
    """Toys on four ranks: errors by case, two steps that add up, sums a step, collectives in W, norm, a refusal."""
    figures: dict[str, Any] = {}
    tokens, labels = batch()
    for tied, schedule, mesh in (
        (False, "zbh1", Mesh(2, tensor=2)), (True, "1f1b", Mesh(2, tensor=2)), (True, "dualpipev", Mesh(2, tensor=2)),
        (False, "dualpipe", Mesh(2, tensor=2)), (True, "zbh1", Mesh(1, data=2, tensor=2)),
    ):  # fmt: skip
        model = toy(tied=tied, blocks=4 if schedule == "dualpipev" else 2)
        loss, gradients = reference(model, tokens, labels, 4)
        pipe = toy_pipe(model, schedule, mesh)
        own_batch, own_labels = (each.chunk(mesh.replicas)[pipe.replica] for each in (tokens, labels))
        sums = [pipe._assembly.network.peer_groups[pipe.places[0]].replicas.issued]
        with _watched_weights(pipe) as started:
            for _ in range(2):
                pipe.step({"input_ids": own_batch}, own_labels)
                sums.append(pipe._assembly.network.peer_groups[pipe.places[0]].replicas.issued)
        norm = torch.stack([grad.norm() for grad in gradients.values()]).norm().item() * 2
        case = {
            "error": error_of(pipe, {name: 2 * grad for name, grad in gradients.items()}),
            "loss": abs(pipe.result.loss.item() - loss) / loss if pipe.result else 1.0,
            "norm": abs(float(pipe.clip_grad_norm_(1e9)) - norm) / norm,
            "in W": started[0],
            "sums": [after - before for before, after in pairwise(sums)],
        }
        if mesh.pipeline == 1:  # behind it the pipeline has failed on every rank
            case["refused"] = _refused(pipe, own_batch + pipe.places[0].tensor, own_labels)
        figures[f"{schedule}{' tied' * tied}{f' on {mesh.replicas} replicas' * (mesh.replicas > 1)}"] = case
        pipe.close()
    return figures


def _refused(pipe: Pipeline, tokens: Tensor, labels: Tensor) -> str:
    """What a step says of tokens [rows, S] that differ between tensor ranks."""
    try:
        pipe.step({"input_ids": tokens}, labels)
    except RuntimeFault as fault:
        return str(fault)
    return ""


def toy_pipe(model: nn.Module, schedule: str, mesh: Mesh, **options: Any) -> Pipeline:
    """The pipeline of a toy, with its plan of styles."""
    program = schedc.compile(schedule, P=mesh.pipeline, **SCHEDULES.get(schedule, {"M": 4}))
    example = {"input_ids": batch()[0][:2]}
    return Pipeline(
        model, program, loss_fn=loss_fn, mesh=mesh, tensor_plan=TOY_PLAN, example=example, timeout=60.0, **options
    )


@contextmanager
def _watched_weights(pipe: Pipeline) -> Iterator[list[int]]:
    """Counts the collectives among tensor ranks that Ws start."""
    group, started = pipe._assembly.network.peer_groups[pipe.places[0]].tensor, [0]
    plain = SplitBackward.weight

    def weight(self: SplitBackward, key: int) -> None:
        before = group.issued
        plain(self, key)
        started[0] += group.issued - before

    with mock.patch.object(SplitBackward, "weight", weight):
        yield started


def states(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Whether a state saved at 2 tensor ranks is the same bits at 1 and 4, with the optimizer's."""
    tokens, labels = batch()
    whole: dict[str, dict[str, str]] = {}
    for number, mesh in enumerate((Mesh(2, tensor=2), Mesh(1, tensor=4), Mesh(2, data=2))):
        pipe = toy_pipe(toy(blocks=2), "1f1b", mesh)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        rows = tokens.chunk(mesh.replicas)[pipe.replica], labels.chunk(mesh.replicas)[pipe.replica]
        if number == 0:
            for _ in range(2):
                pipe.step({"input_ids": tokens}, labels)
                optimizer.step()
                optimizer.zero_grad()
            checkpoint.save(folder, pipe, optimizer)
        else:
            checkpoint.load(folder, pipe, optimizer)
        again = pipe.full_state_dict()
        checkpoint.save(f"{folder}-{number}", pipe, optimizer)
        pipe.step({"input_ids": rows[0]}, rows[1])
        optimizer.step()  # with the state that was loaded
        if rank == 0:
            whole[str(mesh)] = {name: sha256(value.numpy().tobytes()).hexdigest()[:12] for name, value in again.items()}
        pipe.close()
    return whole


def share(rank: int, world: int) -> dict[str, Any]:
    """In a Llama of width 256: the share of parameters whose gradients W makes, and exchanges that Ws start."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 64}
    model, (tokens, labels) = family("llama", **sizes), batch()
    pipe = Pipeline(
        model, schedc.compile("zbh1", P=2, M=4), loss_fn=loss_fn, mesh=Mesh(2, tensor=2),
        example={"input_ids": tokens[:2]}, timeout=60.0,
    )  # fmt: skip
    made: set[int] = set()
    group, started = pipe._assembly.network.peer_groups[pipe.places[0]].tensor, 0
    plain = SplitBackward.weight

    def weight(self: SplitBackward, key: int) -> None:
        nonlocal started
        before, issued = {p: None if p.grad is None else p.grad.clone() for p in pipe.parameters()}, group.issued
        plain(self, key)
        started += group.issued - issued
        for parameter, old in before.items():
            grad = parameter.grad
            if parameter.dim() > 1 and grad is not None and (old is None or not torch.equal(old, grad)):
                made.add(id(parameter))

    with mock.patch.object(SplitBackward, "weight", weight):
        pipe.step({"input_ids": tokens}, labels)
    blocks = [p for name, p in pipe.named_parameters() if "layers" in name]
    total = sum(p.numel() for p in blocks)
    result = {"share": sum(p.numel() for p in blocks if id(p) in made) / total, "in_W": started}
    pipe.close()
    return result
