"""Packed rows over pipeline and tensor ranks, against each document alone."""

from __future__ import annotations

import pytest

from schedc_runtime.testing import pool
from support.needs import needs
from support.sweeps import in_sweeps

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@in_sweeps(
    "runtime/tensor_parallel/test_context.py::test_documents_over_context_ranks_are_those_alone",
    "runtime/tensor_parallel/test_tensor_parallel.py::test_tensor_ranks_with_other_batches_are_refused",
)
@needs("transformers")
def test_documents_are_those_alone_and_differing_ones_are_refused() -> None:
    for told in pool(4).run("support.document_cases:documents", timeout=240, names=["qwen3"]):
        refused = told.pop("refused")
        assert set(told) == {"qwen3 on 1 tensor ranks", "qwen3 on 2 tensor ranks"}
        assert max(told.values()) <= 1e-14, told
        assert "position_ids" in refused or "has other values on" in refused, refused
        assert "tensor rank 1" in refused
