"""Oracles of parity: the same stages run serially, and the bitwise comparison with a pipeline."""
