"""What a copy of a state costs beside one of the same bytes in memory, in processor time."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from schedc_runtime.keeper.places import SHARED_MEMORY, Places
from schedc_runtime.trainers.box_file import HeldBox
from schedc_runtime.trainers.image_writer import ImageWriter, state_size
from support.step_costs import PIECES, WRITER, step_costs

MOST = 1.4
"""Processor time of a copy of a state, in copies of its bytes."""


def copy_ratio(tensors: int, nbytes: int, pairs: int) -> list[float]:
    """[pairs] processor times of a copy of a state in ``tensors`` tensors, in plain copies of as many bytes."""
    each = nbytes // tensors // 4
    boxes = [HeldBox(f"model.{number}", torch.ones(each), (each,), (0,)) for number in range(tensors)]
    facts = {"attempt": "", "facts": {}, "run": {}}
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        places = Places.of_run(Path(folder), "costs")
        writer = ImageWriter(places, 0, state_size(boxes))
        plain, target = torch.ones(each * tensors), torch.zeros(each * tensors)
        for number in (0, 1):
            writer.write(number, boxes, number, False, facts)
        ratios = []
        for number in range(pairs):
            begin = time.process_time()
            target.copy_(plain)
            between = time.process_time()
            writer.write(number % 2, boxes, number, False, facts)
            ratios.append((time.process_time() - between) / (between - begin))
        writer.close()
        places.remove()
    return ratios


def block() -> dict[str, Any]:
    """States of 256 MiB in 24 and in 300 tensors, and steps of a small GPT. quiet_ratio: the least of all pairs."""
    ratios = {tensors: copy_ratio(tensors, 256 << 20, 12) for tensors in (24, 300)}
    middle = {tensors: round(median(each), 3) for tensors, each in ratios.items()}
    failures = [f"{tensors} tensors: {ratio} copies" for tensors, ratio in middle.items() if ratio > MOST]
    least = round(min(min(each) for each in ratios.values()), 3)
    steps = step_costs(12)
    bounds = {"step_ratio": PIECES, "writer_ratio": WRITER}
    failures += [f"{name} is {steps[name]}" for name, bound in bounds.items() if steps[name] > bound]
    told = {"cases": len(ratios) + len(bounds), "failed": len(failures), "failures": failures}
    return {**told, "ratio": max(middle.values()), "quiet_ratio": least, **steps}
