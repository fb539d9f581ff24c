"""What `schedc plan list` tells: the shipped models, clusters and fits, and where their figures are from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.planner.presets.tables import DEFAULT_STACK, tables

_ROWS = {
    "bloom": "bigscience-workshop/bigscience, chronicles-prequel.md",
    "mbridge_26_04_01": "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, release 26.04.01",
    "mindspeed_rc2": "Ascend/MindSpeed-LLM v1.0.RC2.0, README.md",
    "vtrain_multi": "VIA-Research/vTrain, data/ground_truth_multi.csv",
}
"""Where the rows of the shipped fits are from; benchmarks/published has them."""


def library_json() -> dict[str, Any]:
    """The shipped models and clusters with the source of each figure, and fits with that of their rows.

    peak: FLOP/s by precision.
    """
    models = {
        name: {"source": table["source"], "published": table["published"]} for name, table in tables("models").items()
    }
    clusters = {
        name: {
            "device": table["device"]["name"],
            "per_node": table["per_node"],
            "peak": table["device"]["peak"],
            "sources": table["sources"],
        }
        for name, table in tables("clusters").items()
    }
    fits = {
        name: {key: table[key] for key in ("devices", "precisions", "rows", "cv_mape_pct")} | {"source": _ROWS[name]}
        for name, table in tables("fits").items()
    }
    stacks = {
        name: {"default": name == DEFAULT_STACK, "software": table.get("software", {}), "constants": table["stack"]}
        for name, table in tables("fits").items()
        if "stack" in table
    }
    head = {"schema": "schedc.shipped", "version": 1}
    return {**head, "models": models, "clusters": clusters, "fits": fits, "stacks": stacks}


def library_text(facts: dict[str, Any]) -> Iterator[str]:
    """The lines of `schedc plan list`, of its JSON."""
    yield "models, with the parameters that their authors state"
    for name, model in facts["models"].items():
        place = model["source"].removeprefix("https://").removesuffix(" (config.json)")
        yield f"  {name:<21} {parameters_text(model['published']['parameters']):>9}  {place}"
    yield "clusters; --json has the source of each figure"
    for name, cluster in facts["clusters"].items():
        peaks = ", ".join(f"{precision} {peak / 1e12:,.0f}" for precision, peak in cluster["peak"].items())
        yield f"  {name:<21} {cluster['per_node']} x {cluster['device']} per node, TFLOP/s {peaks}"
        assumed = ", ".join(key for key, source in cluster["sources"].items() if "assumed" in source)
        yield f"  {'':<21} wholly or partly assumed: {assumed}"

    yield "fits, which clusters name, with their error on rows left out"
    for name, fit in facts["fits"].items():
        yield f"  {name:<21} {fit['rows']} rows, {fit['cv_mape_pct']:.1f} %: {fit['source']}"
        yield f"  {'':<21} {', '.join(fit['devices'])}; {', '.join(fit['precisions'])}"

    yield "stacks of these fits, for --stack: how their software differs from what a search takes"
    for name, stack in facts["stacks"].items():
        traits = ", ".join(f"{trait} {str(value).lower()}" for trait, value in stack["software"].items()) or "nothing"
        yield f"  {name:<21} {traits}{' (the default)' if stack['default'] else ''}"


def parameters_text(number: float) -> str:
    """A count with four digits and its unit."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:,.4g} {unit}"
    return f"{number:,.0f}"
