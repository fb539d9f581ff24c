"""Times of matrix products by hand: how sums that are short slow dense products and products of experts."""

from __future__ import annotations

import numpy as np
import pytest

from schedc.model.sizes import AttentionSizes, ModelSizes
from schedc.planner.fit.estimate import at
from schedc.planner.presets.library import open_cluster
from schedc.planner.times.constants import CONSTANTS
from schedc.planner.times.products import LayerProduct, directions
from schedc.planner.times.table import RunTable
from support.training_runs import run_of

MODEL = ModelSizes("m", 2, 1024, 1024, AttentionSizes(8, 8, 128, 128), ffn=4096, gated=False, seq=1024)


def seconds_per_flop(cluster: str, precision: str, summed: float, grouped: bool, k0: float) -> float:
    """Forward, where memory takes no time and the device is full."""
    table = RunTable([run_of(MODEL, open_cluster(cluster), precision=precision)])
    rows, columns, k = (np.array([size]) for size in (2.0**17, 2.0**15, summed))
    forward, _, _ = directions(table, LayerProduct(rows, columns, k, np.ones(1), grouped=grouped))
    constants = {constant.name: constant.median for constant in CONSTANTS} | {"gemm_k0": k0, "hbm": 1e9}
    return float(forward.seconds(at(constants))[0, 0] / (2.0**33 * summed))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("cluster", "precision", "columns"),
    [
        ("a100-80", "bf16", 100.0),
        ("h100", "bf16", 100.0 * (989 / 3.35) / 153),
        ("h100", "fp8", 100.0 * (1979 / 3.35) / 153),
    ],
)
def test_short_sums_take_as_many_columns_longer(cluster: str, precision: str, columns: float, grouped: bool) -> None:
    """A start takes the time of memory: on an A100 that of ``gemm_k0`` columns, elsewhere by FLOP per byte."""
    short, whole = (seconds_per_flop(cluster, precision, 512.0, grouped, k0) for k0 in (100.0, 1e-9))
    assert short / whole == pytest.approx(1 + columns / 512, rel=1e-3)
    long, endless = (seconds_per_flop(cluster, precision, 8192.0, grouped, k0) for k0 in (100.0, 1e-9))
    assert long / endless == pytest.approx(1 + columns / 8192, rel=1e-3)
