"""A training step around the bound code: its start, random draws, losses, norms and records of routing."""
