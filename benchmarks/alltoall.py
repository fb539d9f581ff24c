"""Compares dispatch and combine between nodes: hierarchical and all-gather against flat, over links of limited speed.

    python benchmarks/alltoall.py [--json]        (as root, with iproute2; otherwise it prints why it is skipped)

Network namespaces emulate four nodes of two ranks. Every node has one virtual interface to a bridge in a fifth
namespace; a token bucket limits the interface in both directions. Ranks of a node reach each other through the
loopback, which is not limited. The namespaces have names of their own and are removed at the end.

Instrument: wall clock of the slowest rank, over gloo, with the modules that training uses. It begins with the tokens'
rows on their ranks, and ends with the summed results there. Between, experts have their rows in order. The routing,
which all methods exchange in the same way, is known before. Tokens choose experts uniformly. Methods take turns.

Printed: the median time and the bytes sent by a node, for each top-k and method, and the method that `auto` takes.
Bytes are those that the kernel counts on the nodes' interfaces, headers included. The predicted ratio of bytes is the
ratio of rows between nodes in closed form.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from figures import give, parser_of

NODES, PER_NODE = 4, 2
TOKENS, WIDTH, EXPERTS = 1024, 256, 64
TOPS = (1, 2, 4, 8)
METHODS = ("flat", "hierarchical", "allgather")
PORT = 29500
TIMEOUT = 60.0
"""The longest time of a collective, in seconds."""
INTERFACE = "eth0"


class Skipped(Exception):
    """The machine cannot run this benchmark; the text says why."""


# ---- the network


def missing_rights() -> str:
    """Why this process cannot make namespaces; empty if it can."""
    if absent := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(absent)} not found (apt-get install iproute2)"
    return "" if os.geteuid() == 0 else "network namespaces need root"


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")


def address(node: int) -> str:
    return f"10.213.0.{node + 1}"


@contextmanager
def network(rate: str) -> Iterator[list[str]]:
    """Names of the nodes' namespaces, joined by a bridge at ``rate`` in each direction; removed at the end."""
    if reason := missing_rights():
        raise Skipped(reason)
    prefix = f"schedc-a2a-{os.getpid()}"
    nodes, bridge = [f"{prefix}-{node}" for node in range(NODES)], f"{prefix}-bridge"
    namespaces: list[str] = []
    try:
        for name in (bridge, *nodes):
            command("ip", "netns", "add", name)
            namespaces.append(name)
        command("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        command("ip", "-n", bridge, "link", "set", "bridge", "up")
        for node, name in enumerate(nodes):
            join(name, node, bridge, rate)
        yield nodes
    finally:
        for name in namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def join(name: str, node: int, bridge: str, rate: str) -> None:
    """Connect a node's namespace to the bridge, and limit the interface in both directions."""
    port = f"port{node}"
    command("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", bridge)
    command("ip", "-n", bridge, "link", "set", port, "master", "bridge")
    command("ip", "-n", name, "addr", "add", f"{address(node)}/24", "dev", INTERFACE)
    for space, device in ((name, INTERFACE), (bridge, port)):
        limit = ("rate", rate, "burst", "256kb", "latency", "200ms")
        command("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *limit)
        command("ip", "-n", space, "link", "set", device, "up")
    command("ip", "-n", name, "link", "set", "lo", "up")


def measure(rate: str, repetitions: int) -> dict[str, Any]:
    """Run all ranks in their namespaces; returns the figures that rank 0 prints."""
    with network(rate) as nodes:
        workers: list[subprocess.Popen[str]] = []
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        try:
            for rank in range(NODES * PER_NODE):
                words = ["ip", "netns", "exec", nodes[rank // PER_NODE], sys.executable, str(Path(__file__).resolve())]
                workers.append(
                    subprocess.Popen(
                        [*words, "--rank", str(rank), "--repetitions", str(repetitions)],
                        env=environment, text=True, stdout=subprocess.PIPE if rank == 0 else None,
                    )
                )  # fmt: skip
            output, _ = workers[0].communicate(timeout=900)
            if workers[0].returncode:
                raise RuntimeError(f"rank 0 ended with status {workers[0].returncode}")
            figures: dict[str, Any] = json.loads(output.splitlines()[-1])
            return figures
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


# ---- one rank


def rank_main(rank: int, repetitions: int) -> None:
    """Measure as one of the ranks. Rank 0 prints times and bytes by top-k and method, and the speed inside a node."""
    import torch
    import torch.distributed as dist

    from schedc_runtime.ranks.expert_group import ExpertGroup

    torch.set_num_threads(1)
    size = NODES * PER_NODE
    store = dist.TCPStore(address(0), PORT, size, rank == 0, timeout=timedelta(seconds=120))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
    assert dist.group.WORLD is not None
    group = ExpertGroup.of([range(dist.get_world_size())], PER_NODE, TIMEOUT)
    figures: dict[str, Any] = {"ms": {}, "bytes": {}, "node_bytes_per_s": inside_speed(group)}
    for top in TOPS:
        ways = {method: way(group, method, top) for method in METHODS}
        times: dict[str, list[float]] = {method: [] for method in METHODS}
        sent = dict.fromkeys(METHODS, 0)
        for repetition in range(repetitions + 1):
            for method in METHODS if repetition % 2 else reversed(METHODS):
                group.expert.wait(group.expert.sum(torch.zeros(1)))
                before, start = sent_by_node(), time.perf_counter()
                ways[method]()
                slowest = torch.tensor([time.perf_counter() - start])
                gathered = group.expert.wait(group.expert.all_gather(slowest))
                if repetition:  # the first warms up
                    times[method].append(1e3 * float(gathered.max()))
                    sent[method] += sent_by_node() - before
        totals = group.expert.wait(group.expert.sum(torch.tensor([float(sent[m]) for m in METHODS])))
        figures["ms"][top] = {method: statistics.median(values) for method, values in times.items()}
        figures["bytes"][top] = {
            method: float(total) / size / repetitions for method, total in zip(METHODS, totals, strict=True)
        }
    group.expert.wait(group.expert.sum(torch.zeros(1)))
    if rank == 0:
        print(json.dumps(figures), flush=True)
    os._exit(0)  # destroying the groups would wait for ranks that are gone


def way(group: Any, method: Any, top: int) -> Callable[[], None]:
    """Dispatch and combine for tokens that choose ``top`` experts uniformly; the experts compute nothing."""
    import torch

    from schedc_runtime.moe.counts import Shape, ascending, counts_of_experts
    from schedc_runtime.moe.exchange import RowExchange
    from schedc_runtime.moe.routes import arrive, collect, depart, land, pack, plan_route, relay, relay_back

    generator = torch.Generator().manual_seed(top)
    chosen = torch.rand(group.size, TOKENS, EXPERTS, generator=generator).argsort(-1)[..., :top].contiguous()
    counts = counts_of_experts(chosen, Shape(EXPERTS, NODES, PER_NODE, group.rank, method))
    route = plan_route(ascending(chosen[group.rank], EXPERTS), counts)
    x, weights = torch.randn(TOKENS, WIDTH, generator=generator), torch.rand(TOKENS, top, generator=generator)
    hops = ("flat",) if method == "flat" else ("rail", "node")
    there = [RowExchange("dispatch", hop) for hop in hops]
    back = [RowExchange("combine", hop, reverse=True) for hop in reversed(hops)]
    for exchange in (*there, *back):
        exchange.group = group

    def run() -> None:
        with torch.no_grad():
            rows, gates, *ids = there[0](route, *pack(route, x, weights))
            for exchange in there[1:]:
                rows, gates, *ids = exchange(route, *relay(route, rows, gates, *ids))
            for numbers in ids:
                land(route, numbers)
            rows, gates = arrive(route, rows, gates)
            (rows,) = back[0](route, depart(route, rows * gates[:, None]))
            for exchange in back[1:]:
                (rows,) = exchange(route, relay_back(route, rows))
            collect(route, rows)

    return run


def inside_speed(group: Any) -> float:
    """Bytes per second from one rank to the others of its node while they send, too; the median of several tries."""
    import torch

    payload = torch.zeros(4 * TOKENS, WIDTH)
    share = [len(payload) // PER_NODE] * PER_NODE
    times = []
    for _ in range(7):
        group.expert.wait(group.expert.sum(torch.zeros(1)))
        start = time.perf_counter()
        group.node.wait(group.node.all_to_all((payload,), share, share))
        times.append(time.perf_counter() - start)
    return float(payload.nbytes * (PER_NODE - 1) / PER_NODE / statistics.median(times))


def sent_by_node() -> int:
    """Bytes that this node's interface has sent so far."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


# ---- the figures


def summary(figures: dict[str, Any], rate: float) -> dict[str, Any]:
    """The ratios of times and of bytes by top-k and method. rate: bytes per second of a node's link."""
    from schedc.ir.plan import Topology
    from schedc.step.costs.exchange import Routing, choose_method, rows

    mesh = Topology(NODES, PER_NODE, rail=rate / PER_NODE, node=figures["node_bytes_per_s"])
    row = 4.0 * WIDTH
    table = {}
    for top in TOPS:
        times = figures["ms"][str(top)]
        choice = choose_method(Routing(EXPERTS, top), mesh, TOKENS * row)
        table[top] = {
            "ms": times, "bytes": figures["bytes"][str(top)], "auto": choice.method, "why": choice.why,
            "auto_over_best": times[choice.method] / min(times.values()),
        }  # fmt: skip
    largest = TOPS[-1]
    times, sent = table[largest]["ms"], table[largest]["bytes"]
    flat, hierarchical = (rows(method, Routing(EXPERTS, largest), mesh) for method in METHODS[:2])
    assert flat is not None and hierarchical is not None  # noqa: PT018
    return {
        f"speedup_top{largest}": times["flat"] / min(times["hierarchical"], times["allgather"]),
        "auto_over_best": max(entry["auto_over_best"] for entry in table.values()),
        "bytes_ratio": sent["flat"] / sent["hierarchical"],
        "bytes_ratio_predicted": flat.rail / hierarchical.rail,
        "node_bytes_per_s": figures["node_bytes_per_s"],
        "by_top": table,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--mbit", type=int, default=200, help="speed of a node's link in each direction")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        return rank_main(options.rank, options.repetitions)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    try:
        figures = measure(f"{options.mbit}mbit", options.repetitions)
    except Skipped as reason:
        give({"skipped": str(reason)}, options)
        return None
    result = summary(figures, options.mbit * 1e6 / 8)
    give(result, options)
    return None


if __name__ == "__main__":
    main()
