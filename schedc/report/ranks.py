"""The table of ranks that `check` and `compile` print: all of a few ranks, the most telling of many."""

from __future__ import annotations

from itertools import groupby
from typing import Any

_COLUMNS = ("busy", "bubble", "span_bubble", "peak_activations", "peak_pending_weight")

SUMMARIZED_ABOVE = 32
"""The most lines of the table, unless all ranks are wanted."""


def rank_table(facts: dict[str, Any], every: bool) -> list[str]:
    """A headline and a line per rank, from the report of a schedule.

    Above `SUMMARIZED_ABOVE` ranks, unless ``every`` rank is asked for, neighbours with equal values share a line. If
    that leaves more lines than this, the table keeps those of the first and the last rank. For each column the table
    also keeps the first ranks with the least and the greatest value. A last line says how many ranks are left out.
    """
    columns = [facts[name] for name in _COLUMNS]
    cells = ["  ".join(f"{values[rank]:>{len(name)}g}" for name, values in zip(_COLUMNS, columns, strict=True))
             for rank in range(facts["ranks"])]  # fmt: skip
    runs = [[rank] for rank in range(len(cells))]
    if summarized := not every and len(cells) > SUMMARIZED_ABOVE:
        runs = [list(run) for _, run in groupby(range(len(cells)), key=cells.__getitem__)]
    left_out = 0
    if summarized and len(runs) > SUMMARIZED_ABOVE:
        telling = {0, len(cells) - 1, *(values.index(end(values)) for values in columns for end in (min, max))}
        kept = [run for run in runs if not telling.isdisjoint(run)]
        left_out = len(cells) - sum(map(len, kept))
        runs = kept
    labels = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    width = max(4, *map(len, labels))
    lines = [f"{'rank':>{width}}  " + "  ".join(_COLUMNS)]
    lines += [f"{label:>{width}}  {cells[run[0]]}" for label, run in zip(labels, runs, strict=True)]
    if left_out:
        lines.append(f"{left_out} more ranks, within the least and the greatest values above; `--ranks all` shows them")
    return lines
