"""One stage of the model: the forward, input gradient, weight gradient and recomputation of a microbatch."""
