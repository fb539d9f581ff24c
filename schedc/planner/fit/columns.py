"""The columns of a file of measured steps: kinds, defaults, and required columns."""

from __future__ import annotations

from dataclasses import dataclass

from schedc.planner.price.recomputed import LEVELS
from schedc.planner.space.axes import VALUES


@dataclass(frozen=True)
class Column:
    """A column of rows. kind: `text`, `whole`, `number` or `flag`. default: of an empty cell; None where none is.

    among: permitted texts; empty for all. most: the largest number.
    """

    name: str
    kind: str
    default: str | int | float | None = None
    among: tuple[str, ...] = ()
    most: int = 2**31


def _whole(names: str, default: int | None = None, most: int = 2**31) -> list[Column]:
    return [Column(name, "whole", default, most=most) for name in names.split()]


AS_GROUPS_ASK = -1
"""Spare devices of a row that does not say them: as many as keep groups inside of domains."""

COLUMNS = {
    column.name: column
    for column in (
        Column("model", "text"),
        *_whole("layers", most=10_000),
        *_whole("hidden heads seq microbatch batch"),
        Column("cluster", "text"),
        Column("precision", "text", "bf16", ("bf16", "fp16", "fp8", "fp4")),
        *_whole("tp pp vpp dp ep cp", 1, most=2**20),
        *_whole("devices ffn kv_heads head_dim v_dim q_lora kv_lora rope_dim window", 0),
        *_whole("experts top width shared first_dense limit zero", 0),
        *_whole("vocab", 0),
        *_whole("spare", AS_GROUPS_ASK),
        *_whole("norms grad_bytes", 2),
        Column("gated", "flag", 0),
        Column("expert_bias", "flag", 0),
        Column("tied", "flag", 0),
        *_whole("mtp", 0),
        Column("sizes", "text", ""),
        Column("skew", "number", 1.0),
        Column("schedule", "text", "1f1b"),
        Column("called", "text", ""),
        Column("recompute", "text", "none", ("none", "attention", "full")),
        Column("level", "text", "", ("", *map(str, LEVELS))),
        Column("where", "text", "all", ("all", "chunk0", "first_half")),
        Column("layout", "text", "even", VALUES["layout"]),
        Column("cells", "flag", 0),
        Column("waits", "flag", 0),
        Column("fused", "flag", 1),
        Column("sequence_parallel", "flag", 0),
        Column("overlap", "flag", 0),
        Column("graphs", "flag", 0),
        Column("dropout", "flag", 0),
        Column("block_scales", "flag", 0),
        Column("hides_rows", "flag", 0),
        Column("attention_graphs", "flag", 0),
        Column("chunked_tp", "flag", 0),
        Column("windowed", "text", "half", ("half", "all")),
        Column("alltoall", "text", "flat", ("flat", "hierarchical", "allgather")),
        Column("step_s", "number", 0.0),
        Column("calibration", "text", ""),
        Column("tokens_per_s_per_device", "number", 0.0),
        Column("peak_gib", "number", 0.0),
        Column("left_out", "text", ""),
        Column("source_ref", "text", ""),
        Column("row_id", "text", ""),
        Column("note", "text", ""),
    )
}

REQUIRED = tuple(name for name, column in COLUMNS.items() if column.default is None)

MEASURED = ("step_s", "tokens_per_s_per_device", "calibration")
"""Columns of which a row needs one: a step in two units, or a cost file of `schedc calibrate`."""
