"""Materializes a pipeline's stages: every rank makes the tensors that it holds, the same for any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from schedc_runtime.errors import MaterializeError
from schedc_runtime.materialize.construction import named_tensors
from schedc_runtime.moe.huggingface import original_names, with_swapped_names
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.shards import held_experts
from schedc_runtime.pipeline.agree.agreement import check_fingerprints, difference, fingerprint
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.build.parallelize import take_shards

if TYPE_CHECKING:
    from schedc_runtime.checkpoint.stored import Stored
    from schedc_runtime.materialize.values import OwnPart, Rule, Values

CheckpointSource = str | os.PathLike[str] | Mapping[str, Tensor]
"""The path of a checkpoint, or a state dict with tensors [...] of the model's shapes."""


def materialize(assembly: Assembly, seed: int, source: CheckpointSource | None, rule: Rule | None) -> None:
    """Give the stages here their values. A collective of all ranks of the mesh.

    Raises `MaterializeError` on every rank alike, before anything is made, if a name gets no values on any of them.
    """
    from schedc_runtime.materialize.fill import fill_modules

    deferred = any(each.tensor.is_meta for stage in assembly.held() for each in named_tensors(stage.module))
    with assembly.guard("materializing the model"), assembly.partition.records.changed_by_pipeline():
        values = _agreed_values(assembly, seed, source, rule)
        for place in assembly.places:
            modules = [stage.module for stage in assembly.stages[place].values()]
            fill_modules(modules, values, assembly.device, dict(_parts(modules)))
        prints = fingerprint(assembly.program, assembly.names, assembly.partition.blocks, assembly.copied, {})
        names = assembly.guard.control.names
        different = assembly.guard.control.fold("materialized", prints, lambda everyone: difference(everyone, names))
        check_fingerprints(different)
        if assembly.shards is not None and deferred:
            for place in assembly.places:
                take_shards(assembly, place, [stage.module for stage in assembly.stages[place].values()])
            assembly.shards.shard()


def check_materialized(assembly: Assembly) -> None:
    """Raise `MaterializeError` if a tensor of the stages here has no values yet."""
    if assembly.has_values:
        return
    meta = [each.name for stage in assembly.held() for each in named_tensors(stage.module) if each.tensor.is_meta]
    if meta:
        more = f" and {len(meta) - 1} more tensors are" if len(meta) > 1 else " is"
        raise MaterializeError(
            f"the model has no values yet: `{meta[0]}`{more} on the meta device",
            "call pipe.materialize(seed=...) or pipe.materialize(checkpoint=...) first, on all ranks",
        )
    assembly.has_values = True


def _parts(modules: Iterable[nn.Module]) -> Iterator[tuple[str, OwnPart]]:
    """The parts of tensors that ``modules`` have, by name: of experts, and of products that tensor ranks split."""
    from schedc_runtime.materialize.values import OwnPart

    for module in modules:
        yield from ((name, OwnPart(0, held[0])) for name, held in held_experts(module).items())
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if (split := getattr(parameter, "tensor_parallel", None)) is not None:
                dim, _, rank = split
                yield name, OwnPart(dim, rank * parameter.shape[dim])


def _opened(model: nn.Module, source: CheckpointSource) -> Mapping[str, Stored]:
    """The tensors of a checkpoint under the names of ``model``: those of Hugging Face, and of swapped layers."""
    from schedc_runtime.checkpoint.huggingface import under_model_names
    from schedc_runtime.checkpoint.opened import open_checkpoint

    stored = open_checkpoint(source)
    originals = original_names(model, model.state_dict())
    return with_swapped_names(originals, under_model_names(model, originals.values(), stored))


def _agreed_values(assembly: Assembly, seed: int, source: CheckpointSource | None, rule: Rule | None) -> Values:
    """The values of all names, which every rank can give. A collective."""
    from schedc_runtime.materialize.values import Values

    problem, values = ("", ""), Values()
    try:
        if source is None and not assembly.construction.deferred:
            raise MaterializeError(
                "the model has its values already",
                "make it inside `with schedc_runtime.deferred():`, or pass checkpoint=",
            )
        stored = None if source is None else _opened(assembly.settings.model, source)
        values = Values(assembly.construction, seed, stored, rule)
        values.check()
        layers = (layer for stage in assembly.held() for _, layer in moe_layers(stage.module))
        if not all(layer.experts.placement.is_home for layer in layers):
            raise MaterializeError(
                "experts have moved, and values are made for a pipeline that is new",
                "load a state: pipe.load_state_dict(...), or `load` of schedc_runtime.trainers.checkpoint",
            )
    except MaterializeError as error:
        problem = (error.message, error.help)
    how = f"seed={seed}, checkpoint={'given' if source is not None else None}, init={'given' if rule else None}"
    control = assembly.guard.control
    answers = control.gather("materializing the model", {"how": how, "problem": problem})
    for name, answer in zip(control.names, answers, strict=True):
        if any(answer["problem"]):
            raise MaterializeError(*answer["problem"])
        if answer["how"] != answers[0]["how"]:
            raise MaterializeError(
                f"{control.names[0]} materializes with {answers[0]['how']}, {name} with {answer['how']}",
                "call pipe.materialize(...) with the same arguments on all ranks",
            )
    return values
