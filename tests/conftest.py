"""Settings of all tests: properties take their time, and no test depends on the colours of whoever runs it."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("schedc", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("schedc")

for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
    os.environ.pop(name, None)
