"""Settings of all tests: properties take their time, and no test depends on the colours or the width of a terminal."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("schedc", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("schedc")

for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS"):
    os.environ.pop(name, None)
