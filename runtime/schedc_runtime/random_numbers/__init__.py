"""Random numbers by name: what a model draws is a function of the seed, the step, the microbatch and the place."""
