"""Oracles of parity: the same stages run serially, and the comparison with a pipeline, bit by bit."""
