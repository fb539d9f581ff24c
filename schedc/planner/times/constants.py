"""The constants of the cost model: their prior medians and widths, and many vectors of them as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from schedc.ir.arrays import Floats


@dataclass(frozen=True)
class FitConstant:
    """A constant of the cost model, before anything is measured.

    median: the prior's, in ``unit``. width: standard deviation of its logarithm. most: the largest value that makes
    sense. says: the meaning, and the source of the prior. owner: `device`, `fabric` or `stack`.
    """

    name: str
    median: float
    width: float
    unit: str
    says: str
    most: float = np.inf
    needs: str | None = ""
    """A feature that rows must have for the constant to matter; None: no fit estimates it."""
    owner: str = "stack"


_DEVICE: tuple[FitConstant, ...] = (
    FitConstant("gemm", 0.80, 0.15, "of peak", "large products; A100 tables of cuBLAS", 1.0),
    FitConstant("gemm_k0", 200.0, 1.0, "columns", "summed, where products of an A100 are half as fast", 4000.0),
    FitConstant("hbm", 0.75, 0.2, "of memory", "norms, activations, residuals, optimizer", 1.0),
    FitConstant("attention", 0.5, 0.5, "of peak", "scores of attention and their sums", 1.0),
    FitConstant("fp8", 0.6, 0.2, "of peak", "large products in 8 bits", 1.0, "fp8"),
    FitConstant("fp4", 0.4, 0.3, "of peak", "large products in 4 bits", 1.0, "fp4"),
    FitConstant("blocks", 0.93, 0.08, "of fp8", "products in 8 bits with a scale per block", 1.2, "block_scales"),
    FitConstant("grouped", 0.44, 0.25, "of peak", "products of experts; median of six fits", 1.0, "moe"),
    FitConstant(
        "grouped_r0", 400.0, 0.8, "rows", "products of experts are half as fast at so many rows", 4000.0, "moe"
    ),
    FitConstant(
        "unaligned", 1.3, 0.3, "", "time of products whose heads have a width that 8 does not divide", 4.0, "unaligned"
    ),
)
_FABRIC: tuple[FitConstant, ...] = (
    FitConstant("tp", 0.67, 0.3, "of link", "exchanges between tensor ranks of one node", 1.5, "tp"),
    FitConstant("tp_alpha", 30e-6, 0.7, "s", "start of an exchange between tensor ranks", 1e-2, "tp"),
    FitConstant("tp_nodes", 0.4, 0.5, "of NICs", "exchanges between tensor ranks of several nodes", 2.0, "tp_nodes"),
    FitConstant("ep", 0.6, 0.4, "of link", "rows to experts and back", 1.5, "moe"),
    FitConstant("ep_alpha", 50e-6, 0.7, "s", "start of an exchange of rows", 1e-2, "ep"),
    FitConstant("ep_peer", 2e-6, 0.7, "s", "start of the rows to one more rank; assumed", 1e-3, "ep"),
    FitConstant("crowd", 1.0, 0.15, "", "time of rows over NICs as domains double; DeepEP: 0.74 to 1.14", 2.0, None),
    FitConstant("cp", 0.6, 0.4, "of link", "keys and values to other context ranks", 1.5, "cp"),
    FitConstant("dp", 0.6, 0.6, "of NICs", "sums of gradients", 4.0, "dp"),
    FitConstant("p2p", 1.0, 0.6, "of NIC", "messages between stages", 8.0, "pp"),
)
_STACK: tuple[FitConstant, ...] = (
    FitConstant("launch", 1.2e-3, 0.8, "s", "launches of a layer in a direction", 0.1),
    FitConstant("chunked", 0.5, 0.4, "of exchange", "shown of exchanges in chunks beside products", 1.0, "chunked_tp"),
    FitConstant("chunk", 2e-3, 1.0, "s", "each op of a stage", 1.0),
    FitConstant("host", 5e-3, 1.0, "s", "each step, for each layer of the rank with the most layers", 1.0),
    FitConstant("step", 50e-3, 1.5, "s", "each step, whatever the model", 10.0),
    FitConstant("split", 1.0, 0.1, "", "time of I and W beside that of B", 1.5, "split"),
    FitConstant("graphed", 0.5, 0.4, "", "launches of a MoE layer that graphs of its attention leave", 1.0, "graphed"),
    FitConstant("pieces", 1.3, 0.3, "", "launches of a MoE layer that runs in pieces beside another", 4.0, "overlap"),
    FitConstant("moe_launch", 1.5, 0.5, "", "launches of a MoE layer over those of a dense one", 10.0, "moe"),
    FitConstant("expert_launch", 60e-6, 0.8, "s", "launches for each expert of a rank in one direction", 1e-2, "moe"),
)

OWNERS = ("device", "fabric", "stack")
"""Whose property a constant is: of a device, of the network, or of the software that trains."""

CONSTANTS = tuple(
    replace(each, owner=owner)
    for owner, constants in zip(OWNERS, (_DEVICE, _FABRIC, _STACK), strict=True)
    for each in constants
)

NAMES = tuple(constant.name for constant in CONSTANTS)

SUSTAINED = "sustained "
"""Head of the names of constants that belong to a device: the clock that it sustains, over the fit's mean."""

OF_CLOCK = ("gemm", "fp8", "fp4", "grouped", "attention")
"""Shares of peak, which grow with the clock."""


def sustained(device: str) -> FitConstant:
    """The constant of a device among others in one fit. Limits of power differ; peaks of data sheets ignore them."""
    return FitConstant(
        SUSTAINED + device, 1.0, 0.1, "of mean", "clock of the device over the mean", 1.5, owner="device"
    )


BY_NAME = {constant.name: constant for constant in CONSTANTS}


def described(name: str) -> FitConstant:
    """The constant of a name, also of a device's."""
    return sustained(name.removeprefix(SUSTAINED)) if name.startswith(SUSTAINED) else BY_NAME[name]


def on_device(constants: Mapping[str, float], device: str) -> dict[str, float]:
    """The constants for runs on one device: the clock is in the shares of peak."""
    clock = constants.get(SUSTAINED + device, 1.0)
    kept = {name: value for name, value in constants.items() if not name.startswith(SUSTAINED)}
    return kept | {name: clock * kept.get(name, BY_NAME[name].median) for name in OF_CLOCK if clock != 1.0}


@dataclass(frozen=True, eq=False)
class ConstantVectors:
    """K vectors of constants; each is [1, K] under its name, to be multiplied with columns of rows.

    loads: [1, K] spreads of the loads of experts, in place of those of the runs; None where runs keep their own.
    """

    values: dict[str, Floats]
    loads: Floats | None = None

    @classmethod
    def of(cls, names: Sequence[str], vectors: Floats) -> ConstantVectors:
        """The constants ``names`` from [K, names] values; all others at their prior medians."""
        K = vectors.shape[0]
        rows = {c.name: np.full((1, K), c.median) for c in CONSTANTS}
        rows.update({name: vectors[:, column][None, :] for column, name in enumerate(names)})
        return cls(rows)

    def on(self, devices: Sequence[str]) -> ConstantVectors:
        """The constants for runs on these devices, [runs] names: shares of peak are [runs, K] where clocks differ."""
        if not any(name.startswith(SUSTAINED) for name in self.values):
            return self
        one = np.ones((1, len(self)))
        clock = np.vstack([self.values.get(SUSTAINED + device, one) for device in devices])
        return replace(self, values=self.values | {name: self.values[name] * clock for name in OF_CLOCK})

    def only(self, vector: int) -> ConstantVectors:
        """One of the vectors."""
        loads = None if self.loads is None else self.loads[:, vector : vector + 1]
        return ConstantVectors({name: each[:, vector : vector + 1] for name, each in self.values.items()}, loads)

    def __getitem__(self, name: str) -> Floats:
        return self.values[name]

    def __len__(self) -> int:
        return int(self.values["launch"].shape[1])
