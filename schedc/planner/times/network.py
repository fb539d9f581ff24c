"""Times of exchanges: tensor, expert and context groups, messages of the pipeline, sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Bools, Floats
from schedc.ir.plan import Topology
from schedc.model.parts import LayerExchange, PartName
from schedc.planner.cluster.domains import equal_nodes, members, spanned_domains, tiles
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.problem import TrainingRun
from schedc.planner.times.table import LevelColumns, RunTable
from schedc.step.costs.exchange import Routing, rows


def exchanges(runs: RunTable, constants: ConstantVectors, exchange: LayerExchange, *names: PartName) -> Floats:
    """[runs, K] seconds of an exchange, as often as a forward of these parts has it."""
    number = runs.once((exchange, names), lambda: _number(runs, exchange, names))
    return np.asarray(number * _SECONDS[exchange](runs, constants))


def _number(runs: RunTable, exchange: LayerExchange, names: Sequence[PartName]) -> Floats:
    """[runs, 1] how often a forward of parts has an exchange."""
    counts = [[part.exchanges.count(exchange) for part in runs.part(name)] for name in names]
    return np.asarray(np.array(counts, np.float64).sum(axis=0)[:, None])


def tensor_exchange(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[runs, K] seconds of an all-gather with its reduce-scatter of a microbatch's rows, or of one all-reduce.

    Start times grow with the logarithm of the ranks, as trees and recursive doubling have them.
    """
    n = runs.tp[:, None]
    bytes = (2.0 * runs.tokens * runs.hidden)[:, None]
    inside = runs.levels[0].Bps * constants["tp"]
    sent = gathering(runs.levels, bytes, n, 1.0, inside, constants["tp_nodes"])
    time = np.where(n > 1, 2.0 * (np.log2(n) * constants["tp_alpha"] + sent), 0.0)
    return np.asarray(time * np.where(runs.flag("chunked_tp"), constants["chunked"], 1.0))


def message(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[runs, K] seconds of a message between stages, over all levels. Inside a node it is no faster than the link."""
    bytes = (2.0 * runs.tokens * runs.hidden)[:, None]
    bytes = bytes / np.where(runs.flag("sequence_parallel"), runs.tp[:, None], 1.0)
    near = runs.once("message.near", lambda: (runs.column(lambda run: run.axes.devices) <= runs.near)[:, None])
    node = runs.levels[0]
    far = _farthest(runs.levels, [level.size > 0 for level in runs.levels[1:-1]])
    speed = np.where(near, node.Bps * np.minimum(constants["p2p"], 1.0), far.Bps * constants["p2p"])
    start = np.where(near, node.start, far.start)
    pipelined = runs.once("pipelined", lambda: np.array([[run.axes.pp > 1] for run in runs.each]))
    return np.where(pipelined, start + bytes / speed, 0.0)


def _farthest(levels: Sequence[LevelColumns], beyond: Sequence[Bools]) -> LevelColumns:
    """The outermost level that bytes cross which leave a node. beyond: whether they leave each level between, too."""
    far = levels[1]
    for level, left in zip(levels[2:], beyond, strict=True):
        far = LevelColumns(*(np.where(left, outer, inner) for outer, inner in zip(level, far, strict=True)))
    return far


def expert_exchange(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[runs, K] seconds of a dispatch, or of a combine, of a microbatch on a layer, the lanes in turn."""
    rail, node = exchange_lanes(runs, constants)
    return rail + node


def exchange_lanes(runs: RunTable, constants: ConstantVectors) -> tuple[Floats, Floats]:
    """[runs, K] seconds of one dispatch over the NICs, and over the links of a node.

    Rows go by the method of the run: those of other nodes over the NICs, the others over links. All ranks of a group
    get as many, but for the skew of the fullest one. An exchange starts once, and with each rank that rows go to.
    Levels beyond nodes are in use at once: the slowest one decides. NICs take ``crowd`` times as long with every
    doubling of the domains that a group lies in.
    """
    rail, node = runs.under(constants.loads, "sent", lambda: _sent_bytes(runs, constants.loads))
    inside = runs.levels[0].members(runs.ep[:, None], 1.0)
    far, near = runs.once("peers", lambda: np.array([_peers(run) for run in runs.each], np.float64).T[:, :, None])
    start = constants["ep_alpha"] * (runs.ep[:, None] > 1)
    doublings = runs.once("doublings", lambda: np.log2(runs.column(_domains))[:, None])
    rail = rail * constants["crowd"] ** doublings
    over_rail = rail / (runs.levels[1].Bps * constants["ep"])
    for inner, level in pairwise(runs.levels[1:]):
        left = runs.ep[:, None] - inner.members(runs.ep[:, None], 1.0)
        share = left / np.maximum(1.0, runs.ep[:, None] - inside)
        over_rail = np.maximum(over_rail, share * rail / (level.Bps * constants["ep"]))
    over_node = node / (runs.levels[0].Bps * constants["ep"]) + constants["ep_peer"] * near + start
    return over_rail + constants["ep_peer"] * far, over_node


def _domains(run: TrainingRun) -> int:
    """Domains of the innermost level that an expert group lies in."""
    return spanned_domains(run.axes.ep, run.cluster.levels[0].size, run.cluster.devices)


def _peers(run: TrainingRun) -> tuple[int, int]:
    """Ranks in other nodes that a rank sends rows to, and in its own. Only `flat` sends to all of other nodes."""
    if run.model.moe is None or run.axes.ep == 1:
        return 0, 0
    near, node = _members(run)
    if run.axes.alltoall == "flat":
        return run.axes.ep - near, near - 1
    return (run.axes.ep - near) // node, node - 1 + near // node - 1


def _members(run: TrainingRun) -> tuple[int, int]:
    """Members of the expert group of the worst rank in its domain, and those of the nodes that methods count."""
    near = members(np.array(run.axes.ep, np.float64), 1.0, run.cluster.levels[0].size, run.cluster.devices)
    return int(near), equal_nodes(run.axes.ep, run.cluster)


def _sent_bytes(runs: RunTable, spread: Floats | None) -> tuple[Floats, Floats]:
    """[runs, 1] bytes of one dispatch that leave the node of a rank, and that stay in it; [runs, K] by drawn loads."""
    sent = np.array([_sent_rows(run) for run in runs.each])
    bytes = (2.0 * runs.tokens / runs.tp * runs.hidden)[:, None] * runs.skew(spread)
    return bytes * sent[:, :1], bytes * sent[:, 1:]


def _sent_rows(run: TrainingRun) -> tuple[float, float]:
    """Rows per token that a rank sends to other domains, and over the links of its own.

    On rails, rows for another place of a domain take a link first. Methods other than `flat` count nodes of equally
    many members. Where groups straddle domains, some of these nodes lie in the domain of the rank.
    """
    moe = run.model.moe
    if moe is None or run.axes.ep == 1:
        return 0.0, 0.0
    near, node = _members(run)
    if run.axes.alltoall == "flat":
        far = moe.top * (1.0 - near / run.axes.ep)
        return far, moe.top * (near - 1.0) / run.axes.ep + far * _turned(run, near, (near - 1.0) / near)
    nodes = run.axes.ep // node
    sent = rows(run.axes.alltoall, Routing(moe.experts, moe.top, moe.groups, moe.limit), Topology(nodes, node))
    beside = (near // node - 1) / max(1, nodes - 1) * sent.rail
    far = sent.rail - beside
    return far, sent.node + beside + far * _turned(run, near, 0.0)


def _turned(run: TrainingRun, near: int, share: float) -> float:
    """Share of rows to other domains that take a link to the NIC of their place first; 0 without rails.

    share: where domains hold equally many members of a group, ``near``. Groups that straddle have no equal places.
    """
    if not any(level.rails for level in run.cluster.levels[1:2]):
        return 0.0
    return share if tiles(run.axes.ep, run.cluster.levels[0].size) else 1.0


def context_exchange(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[runs, K] seconds in which keys and values of a layer travel once around the context ranks.

    Each step of the ring waits for its slowest hop. On rails, a hop out of a domain takes a link to the NIC of the next
    place first, unless places are equal.
    """
    bytes = runs.once("keys", lambda: _key_bytes(runs))[:, None] * (runs.cp - 1.0)[:, None]
    cp, tp = runs.cp[:, None], runs.tp[:, None]
    near, node = runs.levels[0].members(cp, tp) == cp, runs.levels[0]
    far = _farthest(runs.levels, [level.members(cp, tp) < cp for level in runs.levels[1:-1]])
    start = (cp - 1.0) * np.where(near, node.start, far.start)
    turned = ~near & (runs.levels[1].rails > 0) & (tp % node.size > 0)
    speed = np.where(near, node.Bps, far.Bps) * constants["cp"]
    return np.asarray(start + bytes / speed + np.where(turned, bytes / (node.Bps * constants["cp"]), 0.0))


_SECONDS = {
    LayerExchange.TENSOR: tensor_exchange,
    LayerExchange.CONTEXT: context_exchange,
    LayerExchange.DISPATCH: expert_exchange,
    LayerExchange.COMBINE: expert_exchange,
}


def _key_bytes(runs: RunTable) -> Floats:
    return 2.0 * runs.tokens / runs.tp * runs.attention(lambda a: a.kv_heads * (a.qk_dim + a.v_dim))


def _reached(levels: Sequence[LevelColumns], ranks: Floats, stride: Floats | float) -> list[Floats]:
    """Members of a group that its worst member reaches over each level from the second one on; at last all of them."""
    return [*(level.members(ranks, stride) for level in levels[1:-1]), ranks]


def gathering(
    levels: Sequence[LevelColumns],
    bytes: Floats,
    ranks: Floats,
    stride: Floats | float,
    inside: Floats,
    beside: Floats | float,
) -> Floats:
    """Seconds in which a rank gets its part of ``bytes`` from each other member of its group, or sends it.

    ranks, stride: members of the group, and devices between them. Members in a node use its NICs together. inside:
    bytes per second inside a node. beside: share of the NICs that is reached. The parts of members come over the levels
    that they lie behind, one level after the other.
    """
    sharing = levels[0].members(ranks, stride)
    speed = np.where(sharing == ranks, inside, np.minimum(levels[1].Bps * sharing * beside, inside))
    first, *further = _reached(levels, ranks, stride)
    seconds = (first - 1) / ranks * bytes / speed
    for level, (before, reached) in zip(levels[2:], pairwise([first, *further]), strict=True):
        speed = np.minimum(level.Bps * sharing * beside, speed)
        seconds = seconds + (reached - before) / ranks * bytes / speed
    return np.asarray(seconds)


class ReplicaLinks(NamedTuple):
    """What sums of gradients travel over.

    levels: of the network, innermost first. inside, beside: shares that are reached of a node's links, and of NICs;
    arrays of one shape with the columns of levels, or numbers.
    """

    levels: tuple[LevelColumns, ...]
    inside: Floats | float
    beside: Floats | float

    def seconds(self, bytes: Floats, ranks: Floats, stride: Floats) -> Floats:
        """Seconds of one collective of ``bytes`` of a rank. Replicas that share a node use its NICs together.

        Bytes go around rings: a ring over the nodes, and a ring in each node.
        """
        node, network, *outer = self.levels
        sharing = node.members(ranks, stride)
        first, *further = (reached / sharing for reached in _reached(self.levels, ranks, stride))
        start = (sharing - 1.0) * node.start + (first - 1.0) * network.start
        for level, (before, reached) in zip(outer, pairwise([first, *further]), strict=True):
            start = start + (reached - before) * level.start
        sent = gathering(self.levels, bytes, ranks, stride, node.Bps * self.inside, self.beside)
        return np.asarray(np.where(ranks > 1, start, 0.0) + sent)
