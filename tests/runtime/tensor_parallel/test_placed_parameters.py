"""Parameters that torch has placed are refused with the style to write."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.build.split_products import refuse_placed


@pytest.mark.parametrize(
    ("placement", "style"), [(Shard(0), "colwise"), (Shard(1), "rowwise"), (Replicate(), "replicate")]
)
def test_a_placed_parameter_is_refused_with_its_style(placement: Shard | Replicate, style: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    refuse_placed(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model[1].weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [placement]))
        with pytest.raises(RuntimeFault, match=r"`1\.weight` is a DTensor with") as fault:
            refuse_placed(model)
    finally:
        dist.destroy_process_group()
    assert f'tensor_plan={{"1": "{style}", ...}}' in fault.value.help
