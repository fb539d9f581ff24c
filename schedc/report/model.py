"""What `schedc plan show` tells: parameters, FLOPs and held tensors of a model, and a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from schedc.ir.plan import Level
from schedc.model.counts import model_flops, model_parameters, saved_tensors
from schedc.model.layer import Layer
from schedc.model.parts import PartName
from schedc.model.sizes import LayerKind, ModelSizes
from schedc.planner.cluster.values import Cluster
from schedc.planner.presets.library import PublishedCount
from schedc.report.shipped import parameters_text

DTYPE = "bf16"
"""The type of activations in these facts."""

_PUBLISHED = "published"


def to_json(model: ModelSizes, seq: int, published: PublishedCount | None, cluster: Cluster | None) -> dict[str, Any]:
    """The facts of a model on sequences of ``seq`` tokens, and of a cluster if there is one. Bytes are per token."""
    counts, flops = model_parameters(model), model_flops(model, seq)
    words = counts.by_part.get(PartName.EMBEDDING, 0)
    facts: dict[str, Any] = {
        "schema": "schedc.model_facts",
        "version": 1,
        "model": {"name": model.name, "layers": model.layers, "hidden": model.hidden, "mtp": model.mtp},
        "parameters": {
            "total": counts.total,
            "active": counts.active,
            "active_without_embedding": counts.active - words,
            "mtp": counts.mtp,
            "parts": {str(part): count for part, count in counts.by_part.items()},
            "layers": list(_layers(model)),
        },
        "flops_per_token": {
            "seq": seq,
            "causal": True,
            "forward": flops.total,
            "mtp": flops.mtp,
            "parts": {str(part): count for part, count in flops.by_part.items()},
        },
        "held": {"dtype": DTYPE, "kinds": {str(kind): _held(model, kind) for kind in dict.fromkeys(model.kinds)}},
    }
    if published is not None:
        facts[_PUBLISHED] = {"parameters": published.parameters, "source": published.source}
    return facts | ({"cluster": cluster_facts(cluster)} if cluster else {})


def _layers(model: ModelSizes) -> Iterator[dict[str, Any]]:
    """Runs of layers with equal parameters, from 0; those that predict further tokens come last."""
    counts = model_parameters(model)
    first = 0
    for layer, run in groupby((*counts.layers, *counts.further)):
        last = first + len(list(run)) - 1
        kind = "mtp" if first >= model.layers else str(model.kind_of(first))
        parts = {str(part): count for part, count in layer.items()}
        yield {"first": first, "last": last, "kind": kind, "each": sum(layer.values()), "parts": parts}
        first = last + 1


def _held(model: ModelSizes, kind: LayerKind) -> dict[str, Any]:
    tensors = [
        {"name": x.name, "part": str(x.part), "bytes": x.bytes, "dropped": x.dropped and str(x.dropped)}
        for x in saved_tensors(model, kind, DTYPE)
    ]
    levels = {str(level): Layer(model, kind, DTYPE).held(level) for level in Level}
    return {"tensors": tensors, "levels": levels}


def cluster_facts(cluster: Cluster) -> dict[str, Any]:
    """The facts of a cluster: FLOP/s, bytes, bytes per second in one direction, and seconds of latency."""
    device = cluster.device
    return {
        "name": cluster.name,
        "devices": cluster.devices,
        "per_node": cluster.per_node,
        "device": device.name,
        "peak": dict(device.peak),
        "hbm_bytes": device.hbm_bytes,
        "usable_bytes": device.usable_bytes,
        "hbm_Bps": device.hbm_Bps,
        "levels": [
            {
                "name": level.name,
                "size": level.size,
                "alpha_s": level.alpha_s,
                "device_Bps": cluster.device_Bps(level),
                "rails": level.rails,
            }
            for level in cluster.levels
        ],
    }


def to_text(facts: dict[str, Any]) -> Iterator[str]:
    """The lines of `schedc plan show`, of its JSON."""
    counts, flops = facts["parameters"], facts["flops_per_token"]
    further = f", and {parameters_text(counts['mtp'])} that predict further tokens" if counts["mtp"] else ""
    total, active = parameters_text(counts["total"]), parameters_text(counts["active"])
    yield f"{facts['model']['name']}: {total} parameters, {active} active{further}"
    if stated := facts.get(_PUBLISHED):
        yield f"published: {parameters_text(stated['parameters'])} ({stated['source']})"
    yield ""
    yield f"{'part':<11} {'parameters':>12} {'GFLOP per token':>16}   forward, causal, sequences of {flops['seq']:,}"
    for part in counts["parts"] | flops["parts"]:
        products = f"{flops['parts'][part] / 1e9:>16,.3f}" if part in flops["parts"] else f"{'':>16}"
        yield f"{part:<11} {parameters_text(counts['parts'].get(part, 0)):>12} {products}".rstrip()
    yield f"{'forward':<11} {'':>12} {flops['forward'] / 1e9:>16,.3f}   without mtp"
    yield ""
    for run in counts["layers"]:
        one = run["last"] == run["first"]
        which = f"layer {run['first']}" if one else f"layers {run['first']} to {run['last']}"
        yield f"{which}: {run['kind']}, {parameters_text(run['each'])} parameters{'' if one else ' each'}"
    for kind, held in facts["held"]["kinds"].items():
        levels = ", ".join(f"{level} {size / 1e3:,.1f}" for level, size in held["levels"].items())
        yield f"a {kind} layer holds per token, in kB of {facts['held']['dtype']}: {levels}"
    if cluster := facts.get("cluster"):
        yield ""
        yield from _cluster_lines(cluster)


def _cluster_lines(facts: dict[str, Any]) -> Iterator[str]:
    peaks = ", ".join(f"{peak / 1e12:,.0f} in {precision}" for precision, peak in facts["peak"].items())
    yield f"{facts['name']}: {facts['devices']:,} x {facts['device']}, {facts['per_node']} per node"
    memory = f"{facts['usable_bytes'] / 1e9:,.1f} GB usable, {facts['hbm_Bps'] / 1e12:,.2f} TB/s"
    yield f"a device: TFLOP/s {peaks}; {memory}"
    for level in facts["levels"]:
        speed = f"{level['device_Bps'] / 1e9:,.1f} GB/s of a device in one direction"
        rails = ", on rails" if level["rails"] else ""
        yield f"{level['name']}: {level['size']:,} devices, {speed}, {level['alpha_s'] * 1e6:,.1f} us{rails}"
