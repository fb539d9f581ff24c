"""Settings of all tests: a property may take as long as it takes, since a busy machine is no fault of the code."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("schedc", deadline=None)
settings.load_profile("schedc")
