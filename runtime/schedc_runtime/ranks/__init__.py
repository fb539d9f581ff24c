"""The ranks of a mesh: groups, exchanges between ranks, control values, and states of ranks."""
