"""Keeps the newest states of a run in shared memory, and saves them when ranks die. No torch is loaded."""
