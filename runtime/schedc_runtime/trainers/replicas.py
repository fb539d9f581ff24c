"""What trainers ask of processes, answered for a pipeline: the ranks of one pipeline see the same rows of data."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.pipeline import Pipeline
from schedc_runtime.pipeline.step.losses import StepResult
from schedc_runtime.ranks.mesh import Coordinate
from schedc_runtime.transport.distributed import TorchTransport


def shared_outputs(pipe: Pipeline, result: StepResult) -> Any:
    """[rows, ...] the model's outputs on every rank of a pipeline; `Pipeline.evaluate` has them on the last stage's.

    A collective of the ranks of each pipeline. Raises `RuntimeFault` where several ranks hold the last stage.
    """
    assembly = pipe._assembly
    copies = pipe.program.placement.rank_of_stage[:, -1]
    if len(copies) > 1:
        raise RuntimeFault(
            f"the last stage lies on {len(copies)} ranks, and each has the outputs of its own microbatches",
            "predict with a schedule that has one copy of each stage, or take the loss alone (prediction_loss_only)",
        )
    if assembly.network.in_process:
        return result.outputs
    place = pipe.places[0]
    last = place._replace(pipeline=int(copies[0]))
    transport = assembly.network.transports[place]
    assert isinstance(transport, TorchTransport)
    box = [result.outputs if place == last else None]
    dist.broadcast_object_list(box, group_src=last.pipeline, group=transport.group)
    return box[0]


def replicas_apart(pipe: Pipeline) -> int:
    """Number of replicas that bring rows of their own; a process with all ranks brings those of all replicas."""
    return 1 if pipe._assembly.network.in_process else pipe.mesh.replicas


def one_of_each_replica(pipe: Pipeline) -> list[int]:
    """[replicas] a process of each replica: where every rank gives the same, theirs are counted."""
    return [pipe.mesh.process(Coordinate(0, replica)) for replica in range(pipe.mesh.replicas)]
