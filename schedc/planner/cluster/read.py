"""Reads a cluster file (``schedc.cluster/1``), and puts another number of devices in its place."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from schedc.planner.cluster.values import PRECISIONS, Accelerator, Cluster, NetworkLevel
from schedc.planner.reading.keys import Keys
from schedc.planner.reading.texts import parse_table, read_source
from schedc.source import Source

SCHEMA = "schedc.cluster/1"
MOST_DEVICES = 10_000_000


def load_cluster(path: Path, devices: int | None = None) -> Cluster:
    """The cluster of a file. Raises `DiagnosticError` (S705 to S707)."""
    return parse_cluster(read_source(path, "S705", "cluster"), devices)


def parse_cluster(source: Source, devices: int | None = None) -> Cluster:
    """The cluster of a TOML text, with ``devices`` in place of its own if these are given.

    Raises `DiagnosticError` for a text that is none (S705), values that are none (S706), and values that contradict
    each other (S707).
    """
    keys = Keys(parse_table(source, "S705", SCHEMA), source, "S706")
    name = keys.text("name", default=Path(source.name).stem)
    said = keys.integer("devices", most=MOST_DEVICES)
    per_node = keys.integer("per_node", most=MOST_DEVICES)
    device = _device(keys)
    levels = _levels(keys, devices or said)
    fit, alike = keys.text("fit", default=""), keys.text("alike", default="")
    keys.inner("sources")
    keys.refuse_rest()
    keys.stop()
    assert device is not None
    cluster = Cluster(name, devices or said, per_node, device, levels, fit, source, alike=alike)
    _check(cluster, keys)
    keys.stop()
    return cluster


def with_devices(cluster: Cluster, devices: int) -> Cluster:
    """The cluster with another number of devices: the outermost level reaches all. Raises as `parse_cluster`."""
    assert cluster.source is not None
    if cluster.source.text:
        return parse_cluster(cluster.source, devices)
    return replace(cluster, devices=devices)


def _device(keys: Keys) -> Accelerator | None:
    inner = keys.inner("device")
    if inner is None:
        if not keys.findings:
            keys.say("device", "no table [device]", "write [device] with peak and memory")
        return None
    peak = inner.inner("peak")
    if peak is None:
        inner.say("peak", "no `device.peak`", "write `peak = { bf16 = 989e12 }`, in FLOP/s")
    speeds = {each: peak.number(each) for each in PRECISIONS if each in peak.table} if peak else {}
    if peak:
        peak.taken.update(PRECISIONS)
        peak.refuse_rest()
    device = Accelerator(
        inner.text("name", default="device"),
        speeds,
        inner.integer("sms"),
        inner.integer("hbm_bytes", most=2**50),
        inner.number("hbm_Bps"),
        inner.number("usable", most=1.0),
        inner.number("host_Bps") if inner.has("host_Bps") else 0.0,
    )
    inner.refuse_rest()
    return device


def _levels(keys: Keys, devices: int) -> tuple[NetworkLevel, ...]:
    tables = keys.table.get("level")
    keys.taken.add("level")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        keys.say("level", "no levels of the network", "write a table [[level]] for each, innermost first")
        return ()
    levels: list[NetworkLevel] = []
    for number in range(len(tables)):
        inner = keys.row("level", number)
        inside = levels[-1].size if levels else 1
        outermost = number == len(tables) - 1
        level = NetworkLevel(
            inner.text("name", default=f"level {number}"),
            inner.integer("size", default=-(-devices // inside) * inside if outermost else None, most=MOST_DEVICES),
            inner.number("alpha_s", most=1.0),
            inner.number("Bps"),
            inner.integer("nics", default=0, least=0, most=10_000),
            inner.number("oversubscription", default=1.0, most=1e6),
            inner.flag("rails"),
        )
        inner.refuse_rest()
        levels.append(level)
    return tuple(levels)


def _check(cluster: Cluster, keys: Keys) -> None:
    """Findings (S707) where sizes contradict each other."""
    if cluster.devices % cluster.per_node:
        near = cluster.devices // cluster.per_node * cluster.per_node or cluster.per_node
        message = f"{cluster.devices:,} devices are not a multiple of {cluster.per_node} per node"
        keys.say("devices", message, f"take whole nodes, for example {near:,} devices", "S707")
    for number, (inside, level) in enumerate(pairwise(cluster.levels), 1):
        if level.size < inside.size or level.size % inside.size:
            less = "smaller than" if level.size < inside.size else "not a multiple of"
            message = f"level `{level.name}` of {level.size:,} devices is {less} `{inside.name}` of {inside.size:,}"
            keys.row("level", number).say("size", message, "name levels from the innermost to the outermost", "S707")
    if cluster.levels[-1].size < cluster.devices:
        last, number = cluster.levels[-1], len(cluster.levels) - 1
        message = f"level `{last.name}` reaches {last.size:,} of {cluster.devices:,} devices"
        help = "leave out `size` of the outermost level: it reaches all devices"
        keys.row("level", number).say("size", message, help, "S707")
