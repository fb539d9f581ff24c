"""What a process of its own prints of steps on fake tensors, as JSON: `test_fake_device.py` starts it."""

from __future__ import annotations

import json
from unittest.mock import patch

import torch

from schedc_runtime.execute.executor import InstructionError
from schedc_runtime.moe import router
from support.fake_device import PLANS, Asked, fake_step, host_asks
from support.short_search import short_search


def failure(asked: Asked, lines: str) -> list[str]:
    """The kind of the error that ends a step, and its text; nothing if it does not fail."""
    try:
        fake_step(asked, "1f1b", lines)
    except InstructionError as error:
        return [type(error.__cause__).__name__, str(error)]
    return []


def on_the_host(scores: torch.Tensor, top: int, *groups: int) -> torch.Tensor:
    """[N, top] experts, in the memory of the host."""
    return torch.zeros(len(scores), top, dtype=torch.int64)


def main() -> None:
    with short_search():
        static, asked = host_asks("zbv", "bounded"), Asked()
        with patch.object(router, "choose_experts", on_the_host):
            on_host = failure(Asked(), PLANS["padded"])
        failure(asked, "  alltoall flat\n")  # zeros are no sizes
    print(json.dumps({"static": static, "on_host": on_host, "inside": asked.inside}))


if __name__ == "__main__":
    main()
