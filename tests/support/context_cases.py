"""Cases of context parallelism on real ranks: packed rows against each document alone, in models of Transformers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import schedc
from schedc.load.library import Text
from schedc.source import Source
from schedc_runtime import Checkpoints, ChunkedLoss, Cut, Mesh, Pipeline, deferred
from schedc_runtime.data.context import ContextRows, context_rows
from schedc_runtime.data.documents import thd_inputs
from schedc_runtime.errors import PartitionError, RuntimeFault
from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.measure.rank_traces import save_trace
from schedc_runtime.partition.example import CONTEXT
from schedc_runtime.saved.form import step_folder
from schedc_runtime.tensor_parallel.varlen import attend_by_documents
from support import document_cases
from support.cell_orders import digest, in_each_order
from support.document_cases import alone, packed
from support.gradient_errors import error_of
from support.plain_varlen import plain_kernel
from support.tensor_cases import SCHEDULES, family, wide_norms
from support.tensor_expert_cases import expert_family
from support.tensor_level_cases import counting_held
from support.tensor_run_cases import wait_for

WIDTH = 6
"""Own tokens of a row, where groups of context ranks have other rows."""


def own_rows(
    mesh: Mesh, replica: int, microbatches: int, most: int | None = None, width: int | None = None
) -> ContextRows:
    """What a rank takes of the packed rows: own tokens of the rows of its group. most, width: as of `context_rows`."""
    groups, (group, rank) = mesh.replicas // mesh.context, divmod(replica, mesh.context)
    rows = [each.chunk(groups)[group] for each in packed()]
    together, width = len(rows[0]) // microbatches, width or (WIDTH if groups > 1 else None)
    given = {"ranks": mesh.context, "rank": rank, "together": together, "multiple": mesh.tensor}
    return context_rows(*rows, **given, width=width, most=most)


OFFLOADED = """sched 1
plan moved = zbh1 {
  layers 2
  host 100000 at 1
  offload all
}
"""


def _pipe(
    model: nn.Module, schedule: str, mesh: Mesh, most: int | None = None, **options: Any
) -> tuple[Pipeline, ContextRows]:
    sizes = SCHEDULES.get(schedule, {"M": 4})
    named = Text(Source("moved.sched", OFFLOADED)) if schedule == "offloaded" else schedule
    replica = mesh.coordinate(torch.distributed.get_rank()).replica
    rows = own_rows(mesh, replica, sizes["M"], most)
    example = {name: value[:2] for name, value in rows.inputs.items()}
    given = {"loss_fn": ChunkedLoss("lm_head", chunk=5), "example": example, **options}
    pipe = Pipeline(model, schedc.compile(named, P=mesh.pipeline, **sizes), mesh=mesh, timeout=60.0, **given)
    return pipe, rows


def sequences(
    rank: int,
    world: int,
    names: Sequence[str],
    schedules: Sequence[str],
    pipeline: int = 2,
    tensor: int = 1,
    **sizes: Any,
) -> list[dict[str, Any]]:
    """A case for each family and schedule: errors of loss and gradients, and whether all orders of a cell agree.

    A family whose layers hand no keywords to their attention is refused: its cases have the words.
    """
    cases, mesh = [], Mesh(pipeline, data=world // pipeline // tensor, tensor=tensor, context=2)
    for name in names:
        with wide_norms():
            model = family(name, **sizes)
            loss, gradients = alone(model)
            for schedule in schedules:
                case = {"family": name, "schedule": schedule, "mesh": repr(mesh)}
                try:
                    pipe, rows = _pipe(deepcopy(model), schedule, mesh)
                except PartitionError as refused:
                    cases.append(case | {"refused": str(refused)})
                    continue
                cases.append(case | _steps(pipe, rows.inputs, rows.targets, loss, gradients))
    return cases


BY_LENGTHS = ("llama", "qwen3", "mistral", "phi3")
"""Families whose attention has no caps of logits, which a kernel by lengths has not."""
MOST = 5
"""Documents of a packed row, what fills it up included."""


def by_lengths(rank: int, world: int, names: Sequence[str], schedule: str = "1f1b") -> list[dict[str, Any]]:
    """A case for each family and way to attend by documents: masks of lengths, the kernel, and context ranks with it.

    The kernel's place is taken by attention run by run (`plain_varlen`).
    """
    cases, whole = [], Mesh(2, data=world // 2)
    ways = {"masks": (whole, nullcontext), "kernel": (whole, plain_kernel)}
    ways["kernel and context ranks"] = Mesh(2, data=world // 2, context=2), plain_kernel
    for name in names:
        with wide_norms():
            model = family(name, num_hidden_layers=2, **({"sliding_window": 3} if name == "mistral" else {}))
            loss, gradients = alone(model)
            for way, (mesh, kernel) in ways.items():
                with kernel():
                    case = _attended(deepcopy(model), schedule, mesh, loss, gradients)
                cases.append({"family": name, "way": way, "mesh": repr(mesh)} | case)
    return cases


def _attended(
    model: nn.Module, schedule: str, mesh: Mesh, loss: float, gradients: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Errors of loss and gradients of steps by `CU_SEQLENS`, and whether all orders of a cell agree."""
    if mesh.context > 1:
        pipe, (inputs, targets) = _pipe(model, schedule, mesh, MOST)
    else:
        attend_by_documents(model)
        replica = mesh.coordinate(torch.distributed.get_rank()).replica
        tokens, documents, targets = (each.chunk(mesh.replicas)[replica] for each in packed())
        inputs = thd_inputs(tokens, documents, MOST)
        pipe, _ = _pipe(model, schedule, mesh, example={name: value[:2] for name, value in inputs.items()})
    return _steps(pipe, inputs, targets, loss, gradients)


PLANNED = """sched 1
plan shared = {schedule}(P = {ranks}, M = 4) {{
  layers {layers}
  experts 8 top 2
  alltoall flat
  parallel {parallel}
  {line}
}}
"""


def planned(
    rank: int,
    world: int,
    names: Sequence[str],
    schedule: str = "1f1b",
    parallel: str = "tp 2 of attention cp 2 ep 4 dp 1",
    layers: int = 4,
    lines: Sequence[str] = ("",),
    *,
    packed: bool = True,
) -> list[Any]:
    """A case for each family and line of a plan, as in `sequences`; the mesh, and the bytes that a microbatch holds.

    The mesh is that of the plan. parallel: how it spreads ranks. lines: levels of recomputation, which have the same
    bits, and slices. packed: rows of several documents, else of one.
    """
    if not packed:
        with mock.patch.object(document_cases, "LENGTHS", ((8,),) * len(document_cases.LENGTHS)):
            return planned(rank, world, names, schedule, parallel, layers, lines)
    given = {"schedule": schedule, "ranks": world // 4, "parallel": parallel, "layers": layers}
    programs = [schedc.compile(Text(Source("shared.sched", PLANNED.format(**given, line=line)))) for line in lines]
    split = programs[0].plan.parallel
    assert split is not None
    mesh = Mesh(1, data=4 // split.tp, tensor=split.tp, context=split.cp)
    cases, rows = [], own_rows(mesh, rank % 4 // split.tp, 4)
    for name in names:
        plain: set[str] = set()
        with wide_norms():
            model = expert_family(name, num_hidden_layers=layers)
            loss, gradients = alone(model)
            for line, program in zip(lines, programs, strict=True):
                pipe = Pipeline(
                    deepcopy(model), program, timeout=60.0, loss_fn=ChunkedLoss("lm_head", chunk=5),
                    example={name: value[:2] for name, value in rows.inputs.items()},
                )  # fmt: skip
                for stage in pipe.held(pipe.places[0]):
                    stage.set_recomputation(pipe.program.plan.recompute_of(stage.index), count=True)
                with counting_held() as counted:
                    case = _steps(pipe, rows.inputs, rows.targets, loss, gradients)
                if "slices" not in line:  # those change the order of sums
                    plain.add(case["bits"])
                told = {"family": name, "line": line, "mesh": repr(pipe.mesh), "held": counted[min(counted)]}
                cases.append(told | case | {"equal": case["equal"] and len(plain) == 1})
    return cases


def _steps(
    pipe: Pipeline, inputs: Any, targets: torch.Tensor, loss: float, gradients: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """The largest error of steps in all orders of a cell, whether these agree, and their bits. Closes the pipeline.

    moves: whether a stage moves activations to the host.
    """
    errors, bits = [], set()
    for _ in in_each_order(pipe):
        got = pipe.step(inputs, targets).item()
        errors += [error_of(pipe, gradients), abs(got - loss) / loss]
        bits.add(digest(pipe))
    moves = any(stage.offload is not None for stage in pipe.held(pipe.places[0]))
    pipe.close()
    return {"error": max(errors), "equal": len(bits) == 1, "bits": min(bits), "moves": moves}


def beside(rank: int, world: int, name: str, schedule: str = "zbh1") -> list[dict[str, Any]]:
    """A case for each thing that a pipeline does beside context ranks, as in `sequences`."""
    cases, mesh = [], Mesh(2, data=world // 2, context=2)
    with wide_norms():
        model = family(name, num_hidden_layers=2)
        loss, gradients = alone(model)
        for way in ("compile=", "offload", "meta device"):
            options = {"compile": {"backend": "aot_eager"}} if way == "compile=" else {}
            with deferred() if way == "meta device" else nullcontext():
                given = family(name, num_hidden_layers=2)
            pipe, rows = _pipe(given, "offloaded" if way == "offload" else schedule, mesh, **options)
            if way == "meta device":
                pipe.materialize(checkpoint=model.state_dict())
            case = _steps(pipe, rows.inputs, rows.targets, loss, gradients)
            cases.append({"family": name, "way": way, "mesh": repr(mesh)} | case)
    return cases


def _two_layers(name: str) -> nn.Module:
    return family(name, num_hidden_layers=2)


def refusals(rank: int, world: int) -> dict[str, str]:
    """What a pipeline says of what context ranks do not serve, by name."""
    mesh = Mesh(2, data=2, context=2)

    def told(step: bool | str = False, make: Any = _two_layers, **options: Any) -> str:
        try:
            pipe, rows = _pipe(make("llama"), "1f1b", mesh, **options)
        except RuntimeFault as fault:
            return str(fault)
        try:
            if step in (True, "twice"):
                pipe.step(rows.inputs, rows.targets)
            if step == "twice":  # the second time, rank 0 of each group has other places
                shift = int(pipe.replica == 0)
                pipe.step({**rows.inputs, CONTEXT: rows.inputs[CONTEXT] + shift}, rows.targets)
            if step == "wide":  # rank 0 of each group has another width
                width = WIDTH + 2 * int(pipe.replica == 0)
                pipe.step(*own_rows(mesh, pipe.replica, 4, width=width))
        except (RuntimeFault, InstructionError) as fault:
            return str(fault)
        finally:
            pipe.close()
        return ""

    def sharded() -> str:
        pipe, _ = _pipe(_two_layers("llama"), "1f1b", mesh)
        try:
            pipe.parallelize(lambda stage, replicas: fully_shard(stage, mesh=replicas["dp"]))
        except RuntimeFault as fault:
            return str(fault)
        finally:
            pipe.close()
        return ""

    return {
        "sharded": sharded(),
        "graphs": told(cut=Cut(graphs=True)),
        "auxiliary": told(make=lambda _: expert_family("Mixtral", 0.01, num_hidden_layers=2)),
        "rng": told(rng="torch"),
        "shift": told(loss_fn=ChunkedLoss("lm_head", shift=True)),
        "mean": told(step=True, loss_fn=lambda output, labels: output["logits"].sum()),
        "flash": told(make=lambda name: _with(_two_layers(name), "flash_attention_2")),
        "differ": told(step="twice"),
        "widths": told(step="wide"),
        "dropped": told(make=lambda _: _two_layers("nemotron")),
        "places": told(example={name: torch.zeros(2, 8, dtype=torch.int64) for name in ("input_ids", "position_ids")}),
    }


def kept_states(rank: int, world: int, folder: str) -> list[dict[str, str]]:
    """Digests of a model, and the next loss, in a run that keeps states and in a run on another mesh.

    The last entry names the files of a trace.
    """
    told = []
    for number, mesh in enumerate((Mesh(2, data=2, context=2), Mesh(1, data=2, tensor=2, context=2))):
        pipe, rows = _pipe(_two_layers("llama"), "1f1b", mesh)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        root = Path(folder) / str(number)
        if rank == 0 and number:
            shutil.copytree(step_folder(Path(folder) / "0", 1), step_folder(root, 1))
        saved = Checkpoints(root, pipe, optimizer, durable=1, keep=9)
        assert saved.resume() == (1 if number else 0)
        if number == 0:
            saved.train(rows.inputs, rows.targets)
            optimizer.step()
            optimizer.zero_grad()
        whole = {name: value.contiguous().numpy() for name, value in pipe.full_state_dict().items()}
        digests = {name: sha256(value.tobytes()).hexdigest()[:12] for name, value in whole.items()}
        loss = saved.train(rows.inputs, rows.targets).item()
        optimizer.step()
        wait_for(root)
        saved.close()
        told.append(digests | {"loss": f"{loss:.5f}"})
        if number == 0:
            optimizer.zero_grad()
            pipe.step(rows.inputs, rows.targets, trace=True)
            traced = [path.name for path in save_trace(pipe, Path(folder) / "traces")]
        pipe.close()
    return [*told, {"traces": ",".join(traced)}]


def _with(model: Any, attention: str) -> nn.Module:
    model.config._attn_implementation_internal = attention
    return model
