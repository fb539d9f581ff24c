"""Compares the planner with facts from elsewhere. Each word is a comparison.

    python benchmarks/planner_truth.py families --json
    python benchmarks/planner_truth.py networks --json

families: the parameters of each family's `config.json` against a meta model of transformers with this configuration,
and windows against `layer_types`. Then each flag of the configuration is turned over, on few layers: equal again, or a
refusal that names the flag. Other families are refused by a mechanism without a model.

networks: plans on three levels, the outermost oversubscribed 1, 2, ..., 1,000 times. Plans whose groups cross
it take strictly longer each time. Plans in one domain of the level inside it take as long. A level that adds nothing
changes no step by more than 1e-9. A search finds what trying all plans finds.

Each word prints `cases`, `failed`, and the figures of each case.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.model.counts import model_parameters
from schedc.planner.cluster.values import Cluster
from schedc.planner.model.config import parse_config
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.priced import step_seconds
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.problem import PlanProblem, TrainingRun
from schedc.planner.times.table import RunTable
from schedc.source import Source

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_FEW = {"num_hidden_layers": 6}

_AS_THEY_ARE = """llama arcee granite helium smollm3 seed_oss ernie4_5 mistral ministral3 phi3 qwen2 qwen3 gemma gemma2
gemma3_text glm glm4 starcoder2 stablelm olmo olmo2 olmo3 exaone4 cohere cohere2 gpt_neox falcon phi gptj gpt2
gpt_bigcode mixtral phimoe granitemoe minimax_m2 olmoe flex_olmo qwen2_moe qwen3_moe llama4_text ernie4_5_moe
deepseek_v3 glm4_moe_lite gpt_oss"""

FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in _AS_THEY_ARE.split()},
    "nemotron": {"num_key_value_heads": 8, **_ROPE},
    "hunyuan_v1_dense": {"head_dim": 128, **_FEW, **_ROPE},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, **_FEW, **_ROPE},
    "dots1": {
        "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1, **_FEW
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1, **_FEW},
    "glm4_moe": {"head_dim": 128},
}  # fmt: skip
"""By ``model_type``, keys that the default configuration lacks."""

REFUSED = {
    "mamba2": "state spaces",
    "jamba": "state spaces",
    "qwen3_next": "linear attention",
    "mllama": "an encoder of pictures",
    "bert": "an encoder",
    "longcat_flash": "two attentions in a layer",
    "apertus": "activations with weights",
}
"""By ``model_type``, the mechanism in the refusal."""


_OF_CALLS = ("return_dict", "output_hidden_states", "output_attentions", "use_cache", "is_encoder_decoder",
             "add_cross_attention")  # fmt: skip
"""What a call returns, and what asks for another class of models."""
_WINDOWED = ("sliding_attention", "chunked_attention")


class Case(NamedTuple):
    """A comparison: what was compared, whether both agree, and the figures."""

    name: str
    agrees: bool
    figures: Mapping[str, Any]


def families() -> list[Case]:
    """Every family of both tables, and every flag of the understood ones."""
    cases = [_counted(name) for name in FAMILIES]
    flags = [_counted(name, flag) for name in FAMILIES for flag in flags_of(name)]
    return [*cases, *flags, *(_refused(*each) for each in REFUSED.items())]


def flags_of(model_type: str) -> list[str]:
    """The truth values of a family's configuration that may change its model."""
    return sorted(
        key for key, value in _config(model_type).to_dict().items() if isinstance(value, bool) and key not in _OF_CALLS
    )


def _config(model_type: str, flag: str = "") -> Any:
    import transformers

    options = FAMILIES[model_type]
    config = transformers.CONFIG_MAPPING[model_type](**options)
    if not flag:
        return config
    few = {"num_hidden_layers": 4} if hasattr(config, "num_hidden_layers") else {}
    return transformers.CONFIG_MAPPING[model_type](**{**options, **few, flag: not getattr(config, flag)})


def _counted(name: str, flag: str = "") -> Case:
    """A family with its defaults, or with one flag turned over."""
    import torch
    import transformers

    config, title = _config(name, flag), f"{name} {flag}".rstrip()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = sum(parameter.numel() for parameter in model.parameters())
    values = {**config.to_dict(), "model_type": name}
    try:
        ours = parse_config(Source("config.json", json.dumps(values, indent=1, default=str)))
    except DiagnosticError as error:
        message = error.diagnostics[0].message
        return Case(title, bool(flag) and f"`{flag}`" in message, {"transformers": theirs, "refused": message})
    figures = {"transformers": theirs, "schedc": model_parameters(ours).total}
    agrees = figures["transformers"] == figures["schedc"]
    if kinds := values.get("layer_types"):
        windowed = [layer for layer, kind in enumerate(kinds[: ours.layers]) if kind in _WINDOWED]
        agrees &= windowed == [*ours.attention.windowed]
    return Case(title, agrees, figures)


def _refused(name: str, mechanism: str) -> Case:
    try:
        parse_config(Source("config.json", json.dumps({"model_type": name})))
    except DiagnosticError as error:
        message = error.diagnostics[0].message
        return Case(name, mechanism in message, {"refused": message})
    return Case(name, False, {"refused": None})


# Networks.

_DOMAIN = 16
"""Devices inside the outermost level of three: two nodes."""

NETWORKS: dict[str, tuple[str, PlanAxes]] = {
    "messages": ("llama-3.1-8b", PlanAxes(8, 1, 4, 1, 1, 2, 1, 1, 32, "1f1b")),
    "interleaved messages": ("llama-3.1-8b", PlanAxes(2, 1, 4, 2, 1, 8, 1, 1, 8, "interleaved_1f1b")),
    "sums": ("llama-3.1-8b", PlanAxes(8, 1, 1, 1, 1, 8, 0, 1, 8, "1f1b")),
    "sums of all devices": ("llama-3.1-8b", PlanAxes(1, 1, 1, 1, 1, 64, 1, 1, 1, "1f1b")),
    "sums in every microbatch": ("llama-3.1-8b", PlanAxes(4, 1, 1, 1, 1, 16, 2, 1, 4, "1f1b")),
    "sums and gathers": ("llama-3.1-8b", PlanAxes(4, 1, 1, 1, 1, 16, 3, 1, 4, "1f1b")),
    "tensor groups": ("llama-3.1-8b", PlanAxes(32, 1, 1, 1, 1, 2, 1, 1, 32, "1f1b")),
    "context groups": ("llama-3.1-8b", PlanAxes(1, 32, 1, 1, 1, 2, 1, 1, 32, "1f1b")),
    "rows": ("qwen3-30b-a3b", PlanAxes(1, 1, 1, 1, 64, 64, 1, 1, 1, "1f1b")),
    "rows by nodes": ("qwen3-30b-a3b", PlanAxes(1, 1, 2, 1, 32, 32, 1, 1, 2, "1f1b", alltoall="hierarchical")),
}
"""What crosses, with the plan on 64 devices. One that stays has a quarter of the ranks of its largest axis."""


def networks() -> list[Case]:
    """Every plan of the table that crosses, every one that stays, and a search."""
    crossing = [_crosses(name, *each) for name, each in NETWORKS.items()]
    return [*crossing, *(_stays(name, *each) for name, each in NETWORKS.items()), _searched()]


def of_three_levels(devices: int, node: int, domain: int, oversubscription: float) -> Cluster:
    """H100s whose nodes lie in domains, with networks between nodes and between domains that differ in nothing else."""
    cluster = open_cluster("h100", devices)
    inner, outer = cluster.levels
    domains = replace(outer, name="domains", size=max(devices, 2 * domain), oversubscription=oversubscription)
    return replace(cluster, levels=(replace(inner, size=node), replace(outer, size=domain), domains), source=None)


def _steps(model: str, axes: PlanAxes, clusters: list[Cluster]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[clusters] seconds of a step of one plan."""
    batch = axes.dp * axes.microbatch * axes.microbatches
    problems = (PlanProblem(open_model(model).at(4096), cluster, batch) for cluster in clusters)
    return step_seconds(RunTable([TrainingRun(problem, axes) for problem in problems]), _MEDIANS)[:, 0]


_MEDIANS = ConstantVectors.of((), np.zeros((1, 0)))


def _crosses(name: str, model: str, axes: PlanAxes) -> Case:
    of_levels = [of_three_levels(axes.devices, 8, _DOMAIN, float(number)) for number in range(1, 1001)]
    steps = _steps(model, axes, [*of_levels, open_cluster("h100", axes.devices)])
    rises, free = float(np.diff(steps[:-1]).min()), float(abs(steps[0] / steps[-1] - 1.0))
    figures = {"free_s": float(steps[0]), "least_rise_s": rises, "most_s": float(steps[-2]), "free_off": free}
    return Case(f"{name} across", rises > 0.0 and free <= 1e-9, figures)


def _stays(name: str, model: str, axes: PlanAxes) -> Case:
    largest = max(("tp", "cp", "pp", "dp"), key=lambda axis: int(getattr(axes, axis)))
    smaller = {largest: getattr(axes, largest) // 4, "ep": max(1, axes.ep // 4)}
    inside = replace(axes, **smaller)
    of_levels = [of_three_levels(_DOMAIN, 8, _DOMAIN, float(number)) for number in (1, 2, 1000)]
    steps = _steps(model, inside, of_levels)
    return Case(f"{name} inside", bool((steps == steps[0]).all()), {"step_s": float(steps[0]), "axes": str(inside)})


def _searched() -> Case:
    """The best plans of a space on nodes of 4 devices and domains of 8, by bounds and by trying all."""
    cluster = of_three_levels(16, 4, 8, 16.0)
    required = [read_condition(text) for text in ("tp <= 4", "microbatch == 1", "cp == 1", "recompute == none")]
    space = PlanSpace.of(open_model("llama-3.1-8b"), cluster, 64, 4096, "standard", required)
    problem = PlanProblem(space.model, cluster, 64)
    best, every = (
        search(space, problem, SearchOptions(policy_seconds=0.0, exhaustive=all_plans)) for all_plans in (False, True)
    )
    steps = [[plan.step_s for plan in result.plans] for result in (best, every)]
    above = max(plan.floor_s / plan.step_s for plan in every.plans)
    figures = {"steps_s": steps[0], "all_s": steps[1], "simulated": best.counts.simulated,
               "all": every.counts.simulated, "floor_over_step": above}  # fmt: skip
    return Case("search", np.allclose(*steps, rtol=1e-12, atol=0.0) and above <= 1 + 1e-12, figures)


WORDS: dict[str, Callable[[], list[Case]]] = {"families": families, "networks": networks}


def main() -> int:
    """Run one word; exit with 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", choices=WORDS)
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    cases = WORDS[asked.word]()
    failed = [case.name for case in cases if not case.agrees]
    if asked.json:
        figures = {case.name: {"agrees": case.agrees, **case.figures} for case in cases}
        print(json.dumps({"cases": len(cases), "failed": len(failed), "figures": figures}, indent=1))
    else:
        for case in cases:
            print(f"{'ok    ' if case.agrees else 'FAILED'} {case.name}: {dict(case.figures)}")
        print(f"{len(cases)} cases, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
