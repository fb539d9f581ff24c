"""Recomputation: which activations a stage holds for its backward, and which it recomputes."""
