"""One stage of a model: forward, input gradients, weight gradients and recomputation of one microbatch."""
