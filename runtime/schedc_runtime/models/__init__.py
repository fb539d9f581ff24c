"""Models that commands, examples and benchmarks train: a GPT and a transformer with mixture of experts."""
