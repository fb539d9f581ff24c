"""`schedc partition`: the lines of a cut, and examples written as shapes."""

from __future__ import annotations

import pytest
import torch

from schedc_runtime.commands.partition import example_of, partition_report
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.models.gpt import GPT, GPTConfig
from schedc_runtime.partition import partition
from schedc_runtime.partition.boundary import TensorSpec


def test_a_cut_is_printed_with_what_crosses() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=32, width=8, heads=2, blocks=4, context=16))
    lines = list(partition_report(partition(model, 2, example=example_of(["int64[2, 16]"]))))
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    assert lines == [
        "recorded with tokens int64[2, 16]",
        f"stage 0: {2 * block + 384:,} parameters, {4 * (2 * block + 384) / 1000:.4g} KB",
        "  units: blocks.0, blocks.1",
        "  beside them: position_embedding, token_embedding",
        "    -> blocks_1: float32[2, 16, 8], 1.024 KB, and its gradient back",
        f"stage 1: {2 * block + 272:,} parameters, {4 * (2 * block + 272) / 1000:.4g} KB",
        "  units: blocks.2, blocks.3",
        "  beside them: head, norm",
    ]


def test_examples_are_written_as_shapes() -> None:
    ids, mask = TensorSpec((2, 8), torch.int64), TensorSpec((2,), torch.bool)
    assert example_of(["ids=int64[2, 8]", "mask=bool[2]"]) == {"ids": ids, "mask": mask}
    assert example_of(["int64[2,8]"]) == (ids,)
    assert example_of([]) is None
    for wrong in (["int65[2]"], ["int64"], ["int64[2]", "a=int64[2]"]):
        with pytest.raises(RuntimeFault, match="--example"):
            example_of(wrong)
