"""Recomputation: the activations that a stage holds for the backward, and the activations that it recomputes."""
