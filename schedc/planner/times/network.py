"""Times of exchanges: tensor, expert and context groups, messages of the pipeline, sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.plan import Topology
from schedc.model.parts import LayerExchange, PartName
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.problem import TrainingRun
from schedc.planner.times.table import RunTable
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
    inside = runs.link[:, None] * constants["tp"]
    over = np.minimum((runs.rail * runs.near)[:, None] * constants["tp_nodes"], inside)
    speed = np.where(n > runs.near[:, None], over, inside)
    time = np.where(n > 1, 2.0 * (np.log2(n) * constants["tp_alpha"] + (n - 1) / n * bytes / speed), 0.0)
    return np.asarray(time * np.where(runs.flag("chunked_tp"), constants["chunked"], 1.0))


def message(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[runs, K] seconds of a message between stages. Inside a node it is no faster than the link."""
    bytes = (2.0 * runs.tokens * runs.hidden)[:, None]
    bytes = bytes / np.where(runs.flag("sequence_parallel"), runs.tp[:, None], 1.0)
    near = runs.once("message.near", lambda: (runs.column(lambda run: run.axes.devices) <= runs.near)[:, None])
    speed = np.where(
        near, runs.link[:, None] * np.minimum(constants["p2p"], 1.0), runs.rail[:, None] * constants["p2p"]
    )
    start = np.where(near, runs.link_start[:, None], runs.rail_start[:, None])
    pipelined = runs.once("pipelined", lambda: np.array([[run.axes.pp > 1] for run in runs.each]))
    return np.where(pipelined, start + bytes / speed, 0.0)


def expert_exchange(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[runs, K] seconds of one dispatch, or of one combine, of a microbatch on one layer, its lanes one by one."""
    rail, node = exchange_lanes(runs, constants)
    return rail + node


def exchange_lanes(runs: RunTable, constants: ConstantVectors) -> tuple[Floats, Floats]:
    """[runs, K] seconds of one dispatch over the NICs, and over the links of a node.

    Rows go by the method of the run: those of other nodes over the NICs, the others over links. All ranks of a group
    get as many, but for the skew of the fullest one. An exchange starts once, and with each rank that rows go to.
    """
    rail, node = runs.once("sent", lambda: _sent_bytes(runs))
    far, near = runs.once("peers", lambda: np.array([_peers(run) for run in runs.each], np.float64).T[:, :, None])
    start = constants["ep_alpha"] * (runs.ep[:, None] > 1)
    over_rail = rail[:, None] / (runs.rail[:, None] * constants["ep"]) + constants["ep_peer"] * far
    return over_rail, node[:, None] / (runs.link[:, None] * constants["ep"]) + constants["ep_peer"] * near + start


def _peers(run: TrainingRun) -> tuple[int, int]:
    """Ranks in other nodes that a rank sends rows to, and in its own. Only `flat` sends to all of other nodes."""
    if run.model.moe is None or run.axes.ep == 1:
        return 0, 0
    near = min(run.cluster.levels[0].size, run.axes.ep)
    return (run.axes.ep - near if run.axes.alltoall == "flat" else run.axes.ep // near - 1), near - 1


def _sent_bytes(runs: RunTable) -> tuple[Floats, Floats]:
    """[runs] bytes of one dispatch that leave the node of a rank, and that stay in it."""
    sent = np.array([_sent_rows(run) for run in runs.each])
    bytes = 2.0 * runs.tokens / runs.tp * runs.hidden * runs.column(lambda run: run.skew)
    return bytes * sent[:, 0], bytes * sent[:, 1]


def _sent_rows(run: TrainingRun) -> tuple[float, float]:
    """Rows per token that a rank sends to other nodes, and inside its own."""
    moe = run.model.moe
    if moe is None or run.axes.ep == 1:
        return 0.0, 0.0
    near = min(run.cluster.levels[0].size, run.axes.ep)
    if run.axes.alltoall == "flat":
        return moe.top * (1.0 - near / run.axes.ep), moe.top * (near - 1.0) / run.axes.ep
    topology = Topology(run.axes.ep // near, near)
    sent = rows(run.axes.alltoall, Routing(moe.experts, moe.top, moe.groups, moe.limit), topology)
    return sent.rail, sent.node


def context_exchange(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[runs, K] seconds in which keys and values of a layer travel once around the context ranks."""
    bytes = runs.once("keys", lambda: _key_bytes(runs))[:, None] * (runs.cp - 1.0)[:, None]
    near = ((runs.tp * runs.cp) <= runs.near)[:, None]
    start = (runs.cp - 1.0)[:, None] * np.where(near, runs.link_start[:, None], runs.rail_start[:, None])
    return np.asarray(start + bytes / (np.where(near, runs.link[:, None], runs.rail[:, None]) * constants["cp"]))


_SECONDS = {
    LayerExchange.TENSOR: tensor_exchange,
    LayerExchange.CONTEXT: context_exchange,
    LayerExchange.DISPATCH: expert_exchange,
    LayerExchange.COMBINE: expert_exchange,
}


def _key_bytes(runs: RunTable) -> Floats:
    return 2.0 * runs.tokens / runs.tp * runs.attention(lambda a: a.kv_heads * (a.qk_dim + a.v_dim))


class ReplicaLinks(NamedTuple):
    """What sums of gradients travel over; arrays of one shape, or numbers.

    near: devices of a node. link, rail: bytes per second of a device inside its node, and its share of the NICs.
    link_start, rail_start: seconds until the first byte of a message arrives. inside, beside: shares of either speed
    that are reached.
    """

    near: Floats | float
    link: Floats | float
    rail: Floats | float
    link_start: Floats | float
    rail_start: Floats | float
    inside: Floats | float
    beside: Floats | float

    def seconds(self, bytes: Floats, ranks: Floats, stride: Floats) -> Floats:
        """Seconds of one collective of ``bytes`` of a rank. Replicas that share a node use its NICs together.

        Bytes go around rings: one over the nodes, and one in each of them.
        """
        sharing = np.maximum(1.0, np.minimum(ranks, self.near / stride))
        start = (sharing - 1.0) * self.link_start + (ranks / sharing - 1.0) * self.rail_start
        inside = self.link * self.inside
        far = np.minimum(self.rail * sharing * self.beside, inside)
        speed = np.where(ranks * stride <= self.near, inside, far)
        return np.asarray(np.where(ranks > 1, start, 0.0) + (ranks - 1) / ranks * bytes / speed)
