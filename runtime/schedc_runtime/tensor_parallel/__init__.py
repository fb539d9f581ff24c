"""Tensor parallelism: layers whose products several ranks split, with exchanges around their cores."""
