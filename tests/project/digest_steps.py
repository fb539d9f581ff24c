"""Digests of training steps: losses, gradients, parameters and the order of execution, bit by bit (see digests.py)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from digest_values import LIBRARY, sha
from torch import Tensor

import schedc
from schedc_runtime import Cut, Mesh, Pipeline
from schedc_runtime.testing import pool

torch.set_num_threads(1)

PLACES = {
    "GPT": ("schedc_runtime.models.gpt", "schedc_runtime.gpt"),
    "GPTConfig": ("schedc_runtime.models.gpt", "schedc_runtime.gpt"),
    "next_token_loss": ("schedc_runtime.models.gpt", "schedc_runtime.gpt"),
    "MoETransformer": ("schedc_runtime.models.moe_transformer", "schedc_runtime.moe.transformer"),
    "MoEConfig": ("schedc_runtime.models.moe_transformer", "schedc_runtime.moe.transformer"),
    "Routing": ("schedc_runtime.moe.router:RouterConfig", "schedc_runtime.moe.router"),
}
"""Where a name of the runtime lies: the newest place first, with the new name behind a colon if it was renamed."""


def runtime(name: str) -> Any:
    for place in PLACES[name]:
        module, _, renamed = place.partition(":")
        try:
            return getattr(import_module(module), renamed or name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {PLACES[name]}")


VOCAB, LENGTH = 32, 6
TWO_NODES = "experts 8 top 2\n topology nodes 2 x 1"
ONE_NODE = "experts 8 top 2\n topology nodes 1 x 2"
FOUR = "experts 8 top 2\n topology nodes 2 x 2"


@dataclass(frozen=True)
class Case:
    """A pipeline and how it is trained.

    lines: of a plan; the model then has experts. replicas: how often the pipeline stands beside itself.
    biases: how uneven the routers' choices are. options: `overlap` for stages in segments, and `shard_dense`.
    """

    schedule: str
    sizes: dict[str, int]
    lines: str = ""
    layers: str = "4 dense 1"
    dropout: float = 0.0
    blocks: int = 6
    biases: float = 0.0
    replicas: int = 1
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        sizes = " ".join(f"{key}={value}" for key, value in self.sizes.items())
        more = [self.lines.replace("\n", ";"), self.layers] if self.lines else []
        more += [f"dropout {self.dropout}"] if self.dropout else []
        more += [f"biases {self.biases}"] if self.biases else []
        more += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        return ", ".join([f"{self.schedule} {sizes}", *more, *self.options])


def dense_cases() -> Iterator[Case]:
    """Every schedule of the library on a GPT, all ranks in this process."""
    for name in sorted(path.stem for path in LIBRARY.glob("*.sched")):
        for ranks, microbatches in ((2, 4), (4, 8)):
            yield Case(name, {"P": ranks, "M": microbatches})
    for name in ("1f1b", "gpipe", "zbv"):
        yield Case(name, {"P": 3, "M": 5})
    for name in ("1f1b", "dualpipev", "zbh1", "zbv", "1f1b_overlap"):
        yield Case(name, {"P": 2, "M": 4}, dropout=0.2)
        yield Case(name, {"P": 2, "M": 4}, dropout=0.2, options=("overlap",))
    yield Case("interleaved_1f1b", {"P": 2, "M": 4, "v": 3})
    yield Case("hanayo", {"P": 2, "M": 4, "w": 3})
    for name in ("1f1b", "dualpipe", "zbv"):
        yield Case(name, {"P": 2, "M": 4}, replicas=2)


EXPERT_LINES = (
    f"{TWO_NODES}\n alltoall flat",
    f"{TWO_NODES}\n alltoall hierarchical\n capacity 1.25 drop position",
    f"{FOUR}\n alltoall hierarchical\n hot 2",
    f"{FOUR}\n alltoall allgather\n capacity 1.25 drop probs",
    f"{ONE_NODE}\n recompute norm",
    f"{ONE_NODE}\n recompute act",
    f"{ONE_NODE}\n recompute light",
    f"{ONE_NODE}\n recompute medium\n recompute chunk 0 full",
    f"{TWO_NODES}\n recompute full\n hot 2 until imbalance < 1.1",
    f"{TWO_NODES}\n recompute all medium adaptive(1.05)",
    f"{TWO_NODES}\n recompute all full adaptive(1.05) by group",
    f"{ONE_NODE}\n recompute full in bubbles",
)
BY_HAND = """overlap auto
 cell F & B {
   compute F.attn B.mlp.I B.mlp.W F.mlp B.attn.I B.attn.W
   comm B.combine F.dispatch B.dispatch F.combine
 }"""
OVERLAPPED = (
    ("dualpipev", f"{TWO_NODES}\n alltoall hierarchical\n overlap auto\n hot 2"),
    ("dualpipev", f"{TWO_NODES}\n alltoall hierarchical\n overlap auto\n recompute full"),
    ("1f1b", f"{ONE_NODE}\n alltoall flat\n overlap auto\n recompute medium in bubbles"),
    ("zbv", f"{TWO_NODES}\n alltoall auto\n overlap auto\n recompute chunk 1 medium"),
    ("1f1b_overlap", f"{TWO_NODES}\n alltoall flat\n overlap auto\n capacity 1.25 drop probs"),
    ("1f1b_overlap", f"{TWO_NODES}\n alltoall hierarchical\n overlap auto\n recompute light adaptive(1.05)"),
    ("1f1b_overlap", f"{TWO_NODES}\n alltoall flat\n {BY_HAND}"),
)
"""Schedules and plans whose cells run in the order of cell programs."""


def expert_cases() -> Iterator[Case]:
    """Plans on a model with experts, all ranks in this process."""
    for number, lines in enumerate(EXPERT_LINES):
        yield Case(("1f1b", "dualpipev")[number % 2], {"P": 2, "M": 4}, lines, dropout=0.1, biases=1.0)
    for name, lines in OVERLAPPED:
        layers = "4" if "cell" in lines else "4 dense 1"
        yield Case(name, {"P": 2, "M": 4}, lines, layers, biases=1.0)
    for name in ("zbh1", "zbv", "dualpipe", "1f1b_overlap", "hanayo", "zb_greedy"):
        yield Case(name, {"P": 2, "M": 4}, f"{TWO_NODES}\n alltoall hierarchical")
    yield Case(
        "dualpipev", {"P": 2, "M": 4}, f"{ONE_NODE}\n recompute medium", layers="4 dense 1 pad 4 at [2, 3, 4, 5]"
    )


def process_cases() -> list[Case]:
    """What runs on four processes."""
    return [
        Case("dualpipev", {"P": 2, "M": 4}, f"{TWO_NODES}\n alltoall hierarchical\n overlap auto", biases=1.0),
        Case("dualpipe", {"P": 2, "M": 4}, f"{TWO_NODES}\n alltoall allgather\n hot 2", biases=1.0),
        Case("1f1b", {"P": 2, "M": 4}, f"{ONE_NODE}\n recompute full adaptive(1.05)", biases=1.0),
        *[Case(name, {"P": 4, "M": 8}) for name in ("1f1b", "zbv", "dualpipe", "hanayo", "zb_auto")],
        Case("dualpipev", {"P": 4, "M": 8}, dropout=0.1, options=("overlap",)),
        Case("zbh1", {"P": 2, "M": 4}, replicas=2, options=("shard_dense",)),
    ]


def model_of(case: Case, stages: int) -> Any:
    """The same weights on every rank, in float32; without a plan at least as many blocks as stages."""
    torch.manual_seed(0)
    if not case.lines:
        return runtime("GPT")(runtime("GPTConfig")(
            width=16, heads=2, blocks=max(case.blocks, stages), vocab=VOCAB, dropout=case.dropout
        ))  # fmt: skip
    layers, *rest = case.layers.split()
    dense = int(rest[1]) if "dense" in rest else 0
    routing = runtime("Routing")(8, 2, scores="sigmoid", biased=True, balance=1e-2)
    sizes = {"width": 8, "heads": 2, "inner": 8, "expert_inner": 4, "query_rank": 4, "key_value_rank": 4}
    narrow = {"plain": 4, "rotary": 2, "value": 4, "routing": routing, "dropout": case.dropout}
    config = runtime("MoEConfig")(
        vocab=VOCAB, dense_blocks=dense, moe_blocks=int(layers) - dense, **{**sizes, **narrow}
    )
    model = runtime("MoETransformer")(config)
    generator = torch.Generator().manual_seed(7)
    for name, buffer in model.named_buffers():
        if name.endswith(".bias"):
            buffer.copy_(case.biases * torch.randn(buffer.shape, generator=generator))
    return model


def pipeline_of(case: Case, in_process: bool) -> Pipeline:
    options: dict[str, Any] = {"cut": Cut(segmented=True)} if "overlap" in case.options else {}
    if case.lines:
        sizes = ", ".join(f"{name} = {value}" for name, value in case.sizes.items())
        text = f"sched 1\nplan tried = {case.schedule}({sizes}) {{\n layers {case.layers}\n {case.lines}\n}}\n"
        folder = Path(f"plans{os.getpid()}").resolve()
        folder.mkdir(exist_ok=True)
        path = folder / "tried.sched"
        path.write_text(text, encoding="utf-8")
        program = schedc.compile(f"{path}:tried")
    else:
        program = schedc.compile(case.schedule, **case.sizes)
        if case.replicas > 1:
            options["mesh"] = Mesh(program.ranks, 1, case.replicas, shard_dense="shard_dense" in case.options)
    loss_fn = runtime("next_token_loss")
    return Pipeline(
        model_of(case, program.stages), program, loss_fn=loss_fn, in_process=in_process, timeout=60, **options
    )


def trained(case: Case, in_process: bool = True) -> dict[str, str]:
    """Digests of two steps of gradient descent, by what they are of."""
    pipe = pipeline_of(case, in_process)
    replicas = pipe.mesh.replicas
    torch.manual_seed(5)
    digests: dict[str, str] = {}
    for step in range(2):
        pipe.zero_grad()
        generator = torch.Generator().manual_seed(step)
        shape = (2 * pipe.program.microbatches * replicas, LENGTH)
        parts = [torch.randint(0, VOCAB, shape, generator=generator) for _ in range(2)]
        if not in_process:
            parts = [part.chunk(replicas)[pipe.replica] for part in parts]
        loss = pipe.step(*parts, trace=step == 1)
        digests[f"loss {step}"] = bits([("loss", loss)])
        gradients = [(name, p.grad) for name, p in pipe.named_parameters() if p.grad is not None]
        digests[f"gradients {step}"] = bits(gradients)
        with torch.no_grad():
            for parameter in pipe.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        pipe.update_biases()
    digests["evaluated"] = bits([("loss", pipe.evaluate(*parts))])
    digests["parameters"] = bits(pipe.named_parameters())
    digests["state"] = bits(pipe.full_state_dict().items())
    digests["order"] = sha(json.dumps(executed(pipe)))
    pipe.close()
    return digests


def executed(pipe: Pipeline) -> list[Any]:
    """Rows and parts of the program in the order in which they ran, for each local rank of the first replica."""
    return [[rank, [(span.row, span.rows, str(span.part)) for span in spans]] for rank, spans in pipe.intervals.items()]


def bits(named: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of tensors by name, type, shape and bytes; the order in which they come is left out."""
    parts = []
    for name, tensor in named:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        value = local.detach().cpu().contiguous()
        digest = hashlib.sha256(value.numpy().tobytes()).hexdigest()
        parts.append(f"{name} {value.dtype} {tuple(value.shape)} {digest}")
    return sha("\n".join(sorted(parts)))


def attempted(case: Case, in_process: bool = True) -> dict[str, str]:
    """`trained`, or the digest of a refusal."""
    try:
        return trained(case, in_process)
    except Exception as error:
        print(f"steps: {case.name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        return {"refused": sha(type(error).__name__)}


def on_rank(rank: int, world_size: int) -> list[list[Any]]:
    """What a worker process runs: the digests of all cases on this rank."""
    return [[case.name, attempted(case, in_process=False)] for case in process_cases()]


def cases() -> Iterator[tuple[str, str]]:
    """(case, sha256); writes plans into the current folder."""
    for case in (*dense_cases(), *expert_cases()):
        yield from ((f"{case.name}: {what}", digest) for what, digest in attempted(case).items())
    for rank, answers in enumerate(pool(4).run("digest_steps:on_rank", timeout=400)):
        for name, digests in answers:
            yield from ((f"processes, {name}: {what} of rank {rank}", digest) for what, digest in digests.items())
