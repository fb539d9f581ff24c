"""``topology nodes 4 x 8 rail 50 GB/s node 400 GB/s``: the ranks that share experts, and their links."""

from __future__ import annotations

from collections.abc import Iterator

from schedc.ir.plan import Plan, Topology
from schedc.ir.verify_plan import MOST_RANKS
from schedc.plan.directives.base import Directive, Reading
from schedc.syntax.plan import TopologyLine, Word
from schedc.units import exact_unit, speed_of


def _read(reading: Reading, line: TopologyLine) -> None:
    shape = zip(line.words, ("nodes", "x"), strict=True)
    good = [reading.word(word, (name,), "part of a topology") for word, name in shape]
    speeds: dict[str, float] = {}
    for link in line.links:
        if not reading.word(Word(link.name, link.span), ("rail", "node"), "link"):
            continue
        if link.name in speeds:
            reading.fault("S144", f"`{link.name}` is said twice", link.span, "keep one of the two")
        speed = speed_of(link.value, link.unit)
        if speed is None or speed <= 0:
            help = f"write it as `{link.name} 50 GB/s`; Gbit/s and GiB/s are known too"
            reading.fault("S146", f"`{link.name}` without a speed", link.span, help)
        speeds[link.name] = speed or 0.0
    if line.nodes < 1 or line.per_node < 1 or line.nodes * line.per_node > MOST_RANKS:
        message = f"{line.nodes} nodes of {line.per_node} ranks"
        reading.fault("S146", message, line.span, f"from 1 to {MOST_RANKS:,} ranks")
    elif all(good):
        reading.give(topology=Topology(line.nodes, line.per_node, **speeds))


def _write(plan: Plan) -> Iterator[str]:
    if (topology := plan.topology) is not None:
        links = "".join(
            f" {name} {exact_unit(value)}/s" for name in ("rail", "node") if (value := getattr(topology, name))
        )
        yield f"topology nodes {topology.nodes} x {topology.per_node}{links}"


DIRECTIVE = Directive("topology", _read, _write)
