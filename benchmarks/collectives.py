"""Measures sums and gathers among ranks, as the constants `tp`, `tp_nodes` and `dp` of fits say them.

    torchrun --nproc-per-node 8 benchmarks/collectives.py [--json] [--megabytes 1 4 16 64] [--cluster h100]
    python benchmarks/collectives.py [--ranks 4]                    (starts that many processes on this machine)

Instrument: wall clock between two barriers, the slowest rank, the median of the repetitions. Buffers are in bf16, and
lie on GPUs where there are any (nccl), else in host memory (gloo).

    gather, scatter    an all-gather, and a reduce-scatter, of so many bytes of a rank's whole buffer
    sum                an all-reduce: a scatter with a gather behind it
    speed_Bps          bytes per second that a rank gets from the others: the slope of a line through the sizes
    start_s            the line's value at no bytes
    share              with --cluster: the speed over that of the level that reaches all ranks. Of a gather inside a
                       node it is the constant `tp`, of one over nodes `tp_nodes`; of a sum between replicas `dp`
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from figures import give, parser_of
from torch import Tensor

from schedc.planner.presets.library import open_cluster
from schedc_runtime.measure.sum_times import fitted_line
from schedc_runtime.testing import pool

_MEGA = 1 << 20
_WARMUP = 3


def collectives(ranks: int, device: torch.device) -> dict[str, Callable[[Tensor], Any]]:
    """Functions of a whole buffer by name: `gather`, `scatter`, `sum`."""

    def gather(whole: Tensor) -> None:
        dist.all_gather(list(whole.chunk(ranks)), whole.chunk(ranks)[dist.get_rank()].clone())

    def scatter(whole: Tensor) -> None:
        dist.reduce_scatter(
            torch.empty(whole.numel() // ranks, dtype=whole.dtype, device=device), list(whole.chunk(ranks))
        )

    return {"gather": gather, "scatter": scatter, "sum": dist.all_reduce}


def seconds(run: Callable[[Tensor], Any], whole: Tensor, repetitions: int) -> float:
    """Seconds of a collective on the slowest rank, the median."""
    taken = []
    for _ in range(_WARMUP + repetitions):
        _synchronise(whole.device)
        dist.barrier()
        begin = time.perf_counter()
        run(whole)
        _synchronise(whole.device)
        slowest = torch.tensor([time.perf_counter() - begin], device=whole.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken.append(float(slowest))
    return statistics.median(taken[_WARMUP:])


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(megabytes: Sequence[int], repetitions: int, Bps: float | None = None) -> dict[str, Any]:
    """The figures of all collectives among the processes of the group. Bps: of the level that reaches all ranks."""
    ranks = dist.get_world_size()
    on_gpus = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
    figures: dict[str, Any] = {"ranks": ranks, "device": device.type}
    for name, run in collectives(ranks, device).items():
        passes, sizes, times = (2 if name == "sum" else 1), [], []
        for mega in megabytes:
            whole = torch.zeros(mega * _MEGA // 2 // ranks * ranks, dtype=torch.bfloat16, device=device)
            sizes.append(passes * 2.0 * whole.numel() * (ranks - 1) / ranks)
            times.append(seconds(run, whole, repetitions))
        speed, start = fitted_line(sizes, times)
        figures[name] = {"speed_Bps": speed, "start_s": start, "seconds": dict(zip(megabytes, times, strict=True))}
        if Bps is not None:
            figures[name]["share"] = speed / Bps
    return figures


def on_rank(_rank: int, _ranks: int, **asked: Any) -> dict[str, Any]:
    """`measured`, as a pool of processes calls it."""
    return measured(**asked)


def level_Bps(name: str, ranks: int) -> float:
    """Bytes per second of a device at the innermost level of a cluster that reaches so many ranks."""
    cluster = open_cluster(name)
    level = next((each for each in cluster.levels if each.size >= ranks), cluster.levels[-1])
    return cluster.device_Bps(level)


def main() -> None:
    """Measures among the processes of torchrun, or among some that are started here."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--cluster")
    options = parser.parse_args()
    if len(options.megabytes) < 2:
        parser.error("a line needs two sizes: --megabytes 1 64")
    launched = "WORLD_SIZE" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if launched else options.ranks
    asked = {"megabytes": options.megabytes, "repetitions": options.repetitions}
    asked["Bps"] = level_Bps(options.cluster, ranks) if options.cluster else None
    if not launched:
        return give(pool(ranks).run("collectives:on_rank", **asked)[0], options)
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus else "gloo")
    figures, first = measured(**asked), dist.get_rank() == 0
    dist.destroy_process_group()
    return give(figures, options) if first else None


if __name__ == "__main__":
    main()
