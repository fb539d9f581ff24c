"""What `schedc plan --list` tells: the shipped models and clusters, and where their figures are from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schedc.planner.presets.tables import tables


def library_json() -> dict[str, Any]:
    """The shipped models and clusters with the source of each figure. peak: FLOP/s by precision."""
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
    return {"models": models, "clusters": clusters}


def library_text(facts: dict[str, Any]) -> Iterator[str]:
    """The lines of `schedc plan --list`, of its JSON."""
    yield "models, with the parameters that their authors state"
    for name, model in facts["models"].items():
        place = model["source"].removeprefix("https://").removesuffix(" (config.json)")
        yield f"  {name:<21} {count_text(model['published']['parameters']):>9}  {place}"
    yield "clusters; --json has the source of each figure"
    for name, cluster in facts["clusters"].items():
        peaks = ", ".join(f"{precision} {peak / 1e12:,.0f}" for precision, peak in cluster["peak"].items())
        yield f"  {name:<21} {cluster['per_node']} x {cluster['device']} per node, TFLOP/s {peaks}"
        assumed = ", ".join(key for key, source in cluster["sources"].items() if "assumed" in source)
        yield f"  {'':<21} wholly or partly assumed: {assumed}"


def count_text(number: float) -> str:
    """A count with four digits and its unit."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:,.4g} {unit}"
    return f"{number:,.0f}"
