"""Searches for better orders of the same ops under a memory cap, with a proved lower bound (docs/guide/tuning.md)."""
