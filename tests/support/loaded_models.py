"""Lets ranks of a pool have Transformers from their start: a server loads it once, and ranks are forked from it."""

from __future__ import annotations

from schedc_runtime.testing import PRELOADED

MODULES = ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")


def load_for_ranks() -> None:
    """Let the server of all ranks load Transformers. The server must not have started."""
    PRELOADED.extend(module for module in MODULES if module not in PRELOADED)
