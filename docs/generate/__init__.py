"""Makes the reference pages that follow from the package: codes, schedules, commands. `docs/conf.py` calls it."""
