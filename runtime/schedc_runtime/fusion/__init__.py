"""Runs chains of operations of a model's blocks as one function each, which hold fewer tensors for the backward."""
