"""Checkpoints as names with stored tensors, of which any one can be read without the others."""
