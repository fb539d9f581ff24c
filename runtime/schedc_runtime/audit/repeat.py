"""Repeats a microbatch on a stage. Gradients, buffers and counts are afterwards as before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from schedc_runtime.audit.capture import INPUT, INPUT_GRADIENT, LOSS, OUTPUT, OUTPUT_GRADIENT, gradient_digests
from schedc_runtime.audit.digests import Digests, tensor_digest
from schedc_runtime.audit.parcels import Parcel
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.build.loss_function import Expected
from schedc_runtime.pipeline.step.contexts import Undo
from schedc_runtime.random_numbers.numbering import StepKey, by_name
from schedc_runtime.stage.stage import Stage


class Job(NamedTuple):
    """What a stage was given for a microbatch.

    inputs, gradients: tensors [...] of its input boundary, and gradients [...] of its outputs.
    target: an `Expected` on a last stage, else None. key: of its random numbers.
    defer: whether weight gradients are computed apart. first: whether they are compared.
    loss_scale: factor of its loss in the gradients.
    weight, head_scale: as of `LossHead.begin`.
    """

    microbatch: int
    inputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    target: Any
    key: StepKey
    defer: bool
    first: bool
    loss_scale: float
    weight: float | None
    head_scale: float

    def parcel(self) -> Parcel:
        """The job as tensors and JSON. Raises `RuntimeFault` for targets that are not made of tensors and numbers."""
        tensors = {f"{INPUT} {n}": each for n, each in enumerate(self.inputs)}
        tensors |= {f"{OUTPUT_GRADIENT} {n}": each for n, each in enumerate(self.gradients)}
        facts = {"microbatch": self.microbatch, "key": list(self.key), "defer": self.defer, "first": self.first}
        facts |= {"target": None, "loss_scale": self.loss_scale, "weight": self.weight, "head_scale": self.head_scale}
        if self.target is not None:
            number, target, rows, padded = self.target
            leaves, form = pytree.tree_flatten(target)
            check_leaves(leaves)
            plain = [None if isinstance(leaf, Tensor) else [leaf] for leaf in leaves]
            tensors |= {f"target {n}": leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
            facts["target"] = [number, rows, padded, plain, pytree.treespec_dumps(form)]
        return Parcel(tensors, facts)

    @staticmethod
    def of(parcel: Parcel) -> Job:
        """The job of a `parcel`."""
        facts, target = parcel.facts, None
        if facts["target"] is not None:
            number, rows, padded, plain, form = facts["target"]
            leaves = [parcel.tensors[f"target {n}"] if leaf is None else leaf[0] for n, leaf in enumerate(plain)]
            target = Expected(number, pytree.tree_unflatten(leaves, pytree.treespec_loads(form)), rows, padded)
        numbers = facts["loss_scale"], facts["weight"], facts["head_scale"]
        inputs, gradients = (tuple(_numbered(parcel, name)) for name in (INPUT, OUTPUT_GRADIENT))
        return Job(
            facts["microbatch"],
            inputs,
            gradients,
            target,
            StepKey(*facts["key"]),
            facts["defer"],
            facts["first"],
            *numbers,
        )

    @property
    def given(self) -> Digests:
        """The digests of what the stage was given."""
        gradients = {OUTPUT_GRADIENT: tensor_digest(self.gradients)} if self.gradients else {}
        return {INPUT: tensor_digest(self.inputs), **gradients}


def check_leaves(leaves: Sequence[Any]) -> None:
    """Raise `RuntimeFault` for a leaf of targets that no other rank can be sent."""
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, bool, int, float, str, type(None))):
            raise RuntimeFault(
                f"targets hold a {type(leaf).__name__}, which an audit cannot send to another rank",
                "give targets of tensors, numbers and texts in lists, tuples and dicts",
            )


def _numbered(parcel: Parcel, name: str) -> Iterator[Tensor]:
    number = 0
    while (key := f"{name} {number}") in parcel.tensors:
        yield parcel.tensors[key]
        number += 1


def repeat_microbatch(assembly: Assembly, stage: Stage, job: Job) -> Digests:
    """The digests of what the stage computes for a job, by the names of `schedc_runtime.audit.capture`."""
    number, head = job.microbatch, assembly.head
    with _as_before(assembly, stage), torch.enable_grad():
        head.begin(job.weight, keep_outputs=False, scale=job.head_scale)
        if stage.numbering is not None:
            stage.numbering.key = job.key
        with by_name() if stage.numbering is not None else nullcontext():
            outputs = stage.forward(number, job.inputs, job.target, job.loss_scale)
            results = (
                {LOSS: tensor_digest([stage.losses[number]])}
                if stage.loss_fn is not None
                else {OUTPUT: tensor_digest(outputs)}
            )
            gradients = stage.backward(number, job.gradients, defer=job.defer)
            if stage.index:
                results[INPUT_GRADIENT] = tensor_digest(gradients)
            if job.defer:
                stage.weight(number)
        return results | (gradient_digests(dict(stage.module.named_parameters())) if job.first else {})


@contextmanager
def _as_before(assembly: Assembly, stage: Stage) -> Iterator[None]:
    """Sets gradients aside, and brings back all that a forward and a backward change."""
    layers = [part for part in stage.module.modules() if isinstance(part, MoELayer)]
    undo = Undo([stage.module], layers, generators=False)
    undo.begin(training=False)
    gradients = [(parameter, parameter.grad) for parameter in stage.module.parameters()]
    numbering, offload = stage.numbering, stage.offload
    key = numbering.key if numbering is not None else None
    for parameter, _ in gradients:
        parameter.grad = None
    stage.offload = None
    try:
        yield
        stage.check_empty()
    finally:
        stage.offload = offload
        stage.reset()
        assembly.head.take()
        if numbering is not None and key is not None:
            numbering.key = key
        undo.undo()
        for parameter, gradient in gradients:
            parameter.grad = gradient
