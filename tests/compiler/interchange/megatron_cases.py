"""Gives flags to megatron-core: makes a configuration of the flags, and tells its layers and schedule.

    python megatron_cases.py cases.json results.json

Runs beside `make trainers`' packages. The parser of Megatron-LM is not among them: its flags are fields of these
configurations, but for those that `RENAMED` and `TRAINING` name from megatron/training/arguments.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import __version__
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import LayerType

RENAMED = {
    "num_experts": "num_moe_experts",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "swiglu": "gated_linear_unit",
}
TRAINING = {
    "multi_latent_attention": bool,
    "group_query_attention": bool,
    "micro_batch_size": int,
    "global_batch_size": int,
    "seq_length": int,
}
LISTS = ("recompute_modules",)
MODEL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8}
"""Sizes of a model where the flags say none: a plan has others."""


def parser() -> argparse.ArgumentParser:
    """A parser of the fields; a bool is a switch, as in Megatron's."""
    made = argparse.ArgumentParser(allow_abbrev=False)
    back = {field: flag for flag, field in RENAMED.items()}
    fields = {
        field.name: str(field.type)
        for kind in (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
        for field in dataclasses.fields(kind)
    }
    fields |= {name: kind.__name__ for name, kind in TRAINING.items()}
    for name, kind in fields.items():
        flag = "--" + back.get(name, name).replace("_", "-")
        if name in LISTS:
            made.add_argument(flag, dest=name, nargs="*", default=argparse.SUPPRESS)
        elif kind == "bool" or kind == "<class 'bool'>":
            made.add_argument(flag, dest=name, action="store_true", default=argparse.SUPPRESS)
        else:
            made.add_argument(
                flag, dest=name, type=number if "int" in kind or "float" in kind else str, default=argparse.SUPPRESS
            )
    return made


def number(text: str) -> Any:
    """A number or a list of them, as `--moe-layer-freq` takes."""
    return eval(text, {"__builtins__": {}}) if text.startswith("(") else json.loads(text)


def configuration(given: dict[str, Any]) -> TransformerConfig:
    """Megatron's configuration, which checks its fields against each other. Raises what Megatron raises."""
    latent = given.get("multi_latent_attention", False)
    kind = MLATransformerConfig if latent else TransformerConfig
    names = {field.name for field in dataclasses.fields(kind)}
    own = {name: value for name, value in given.items() if name in names}
    if own.pop("gated_linear_unit", False):
        own |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    more = {"pipeline_dtype": torch.bfloat16, "add_bias_linear": False, "bias_activation_fusion": False}
    return kind(**(MODEL | more | own))


def layers(config: TransformerConfig) -> list[list[int]]:
    """Decoder layers and predictions of each stage, in the order of stages; empty without a layout."""
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        return []
    ranks, chunks = config.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    return [
        [layout.layout[rank][chunk].count(kind) for kind in (LayerType.decoder, LayerType.mtp)]
        for chunk in range(chunks)
        for rank in range(ranks)
    ]


def forwards(config: TransformerConfig, microbatches: int) -> list[list[list[int]]]:
    """[ranks] the forwards as (stage, microbatch), and how many of them go ahead of the first backward."""
    ranks, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    table = get_schedule_table(microbatches, chunks or 1, config.microbatch_group_size_per_vp_stage)
    found = []
    for rank in range(ranks):
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        talks = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks)
        _, _, ahead, _ = get_pp_rank_microbatches(
            microbatches, chunks or 1, config.microbatch_group_size_per_vp_stage,
            overlap_moe_expert_parallel_comm=config.overlap_moe_expert_parallel_comm, p2p_communicator=talks,
        )  # fmt: skip
        found.append([[chunk * ranks + rank, microbatch] for microbatch, chunk in table] + [[ahead]])
    return found


def judged(case: dict[str, Any]) -> dict[str, Any]:
    """What Megatron makes of the flags of a case, or why it refuses them."""
    try:
        given = vars(parser().parse_args(case["flags"]))
        config = configuration(given)
    except (ValueError, AssertionError, SystemExit) as error:
        return {"refused": str(error)}
    order = forwards(config, case["microbatches"]) if config.pipeline_model_parallel_size > 1 else []
    modules = config.recompute_modules if config.recompute_granularity == "selective" else []
    return {"layers": layers(config), "forwards": order, "modules": modules}


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    results = {case["name"]: judged(case) for case in json.loads(source.read_text())}
    target.write_text(json.dumps({"version": __version__} | results))
