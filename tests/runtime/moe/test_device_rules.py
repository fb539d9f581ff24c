"""The rules of a GPU on tensors of a CPU: bags that run on, and memory that holds anything before it is written."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch

from runtime.moe.exchange_cases import METHODS, Case, alike, data_of, run_in_process
from schedc_runtime.moe.bags import _UNREAD, Bags, combined, ended
from schedc_runtime.moe.counts import Method
from schedc_runtime.ranks.expert_group import in_process_expert_groups
from schedc_runtime.testing import simulated_device
from support.sweeps import in_sweeps, swept

RULES = ("bags", "fresh")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_behind_the_last_row_are_in_bags_that_nobody_reads(
    dtype: torch.dtype,
) -> None:
    """Ends behind the entries are cut, and no bag is so long that a device would wait for it."""
    summands = torch.randn(5, 3, dtype=dtype)
    for entries, ends in product((0, 3, _UNREAD, 3 * _UNREAD + 1), ([0], [0, 0, 2, 3], [0, 3, 3, 2 * _UNREAD])):
        at = torch.arange(entries) % 5
        bags = Bags(*ended(at, torch.tensor(ends), padded=True), len(ends) - 1)
        cut = [min(end, entries) for end in ends]
        parts = [summands[at[first:last]] for first, last in pairwise(cut)]
        wanted = torch.stack([part.sum(0) for part in parts]) if parts else summands[:0]
        torch.testing.assert_close(combined(summands, [bags]), wanted)
        lengths = torch.cat([bags.offsets, torch.tensor([entries])]).diff()
        assert int(lengths.sum()) == entries
        assert int(lengths[bags.rows :].max()) <= _UNREAD
        with simulated_device(rules="every"):
            assert torch.equal(combined(summands, [bags]), combined(summands, [bags]).nan_to_num())
            torch.testing.assert_close(combined(summands, [bags]), wanted)


@in_sweeps("runtime/device/test_rules.py::test_a_step_keeps_its_bits")
@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("method", swept(METHODS, ["hierarchical"]))
def test_a_layer_has_its_bits_under_the_rules_of_a_gpu(method: Method) -> None:
    """Outputs and all gradients: exact, padded, and in bounded buffers, which are never full."""
    modes: list[dict[str, Any]] = [{}, {"capacity": 1}, {"capacity": 3}, {"bound": 2.0}, {"bound": 4.0}]
    dtypes = (torch.float32, torch.float64)
    cases = [*product([(2, 2)], modes, dtypes[: swept(2, 1)]), *product([(1, 4), (4, 1)], modes[2:], dtypes[:1])]
    for (nodes, per_node), mode, dtype in cases:
        case = Case(nodes, per_node, (9, 0, 5, 7), experts=8, top=3, width=3, dtype=dtype, **mode)
        data = data_of(case)
        expected = run_in_process(case, data, in_process_expert_groups(4, per_node), method)
        with simulated_device(rules=RULES):
            results = run_in_process(case, data, in_process_expert_groups(4, per_node), method)
        for ours, theirs in zip(results, expected, strict=True):
            assert not ours.route.counts.all_flags.any()
            assert alike(ours.tensors, theirs.tensors), case
