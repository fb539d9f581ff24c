"""Models that torch has placed train with the bits of the same styles, or are refused by module and placement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.build.split_products import refuse_placed
from schedc_runtime.tensor_parallel.placed import is_placed, take_placed
from schedc_runtime.testing import pool
from support.needs import needs
from support.sweeps import swept
from support.tensor_cases import family


@pytest.mark.sweep
@needs("transformers")
@pytest.mark.processes
@pytest.mark.slow
def test_a_placed_model_has_the_bits_of_its_styles() -> None:
    """Own rows between cores, whole rows, and a head that keeps a DTensor, on 2 x 2 ranks."""
    names = ["rows", *swept(["whole"], []), "llama"]
    ranks: list[dict[str, Any]] = pool(4).run("support.placed_cases:placed", timeout=240, names=names)
    for rank in ranks:
        said = rank.pop("refused")
        for name, case in rank.items():
            assert case["error"] <= 1e-14, name
            assert (case["equal"], case["plain"]) == (True, True), name
        assert said["table in columns"].startswith("torch has placed `embedding` as Shard(dim=1) (ColwiseParallel")
        assert said["rows of the batch"].startswith("torch has placed `blocks.0.mlp.down` as Shard(dim=1)")
        assert said["another style"].startswith("`blocks.0.mlp.up` has a hook of Other")
        assert said["no end"].startswith("torch has placed `blocks.0.mlp.up` as Shard(dim=0)")
        assert said["no tensor ranks"].startswith("`blocks.0.mlp.up.weight` is a DTensor with Shard(dim=0), and the")


@needs("transformers")
def test_a_tie_that_torch_has_broken_is_refused() -> None:
    model: Any = family("llama", num_hidden_layers=1, tie_word_embeddings=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallelize_module(model, init_device_mesh("cpu", (1,)), {"lm_head": ColwiseParallel()})
        with pytest.raises(RuntimeFault, match="placed them as two tables"):
            take_placed(model)
    finally:
        dist.destroy_process_group()
    assert is_placed(model)


def test_a_placed_parameter_is_refused_without_tensor_ranks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    refuse_placed(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model[1].weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]))
        with pytest.raises(RuntimeFault, match=r"`1\.weight` is a DTensor with Shard\(dim=0\)") as fault:
            refuse_placed(model)
    finally:
        dist.destroy_process_group()
    assert "mesh=Mesh.of_device_mesh(device_mesh)" in fault.value.help
