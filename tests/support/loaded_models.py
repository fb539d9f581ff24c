"""Lets ranks of a pool have Transformers from their start: the server that they are forked from loads it once."""

from __future__ import annotations

from schedc_runtime.testing import PRELOADED

MODULES = ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")


def load_for_ranks() -> None:
    """Load it into the server, which must not have started."""
    PRELOADED.extend(module for module in MODULES if module not in PRELOADED)
