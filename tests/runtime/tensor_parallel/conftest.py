"""Settings of these tests: most ranks run models of Transformers."""

from __future__ import annotations

from support.loaded_models import load_for_ranks

load_for_ranks()
