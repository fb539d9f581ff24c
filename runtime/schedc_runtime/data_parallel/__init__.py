"""Replicas that train the same weights: sums of gradients and sharded parameters, woven into bound code."""
