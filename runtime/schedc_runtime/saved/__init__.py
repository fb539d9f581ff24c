"""Checkpoints of a run on disk: a folder per step, a file per rank, one record that commits all. No torch is loaded."""
