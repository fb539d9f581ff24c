"""The ranks of a mesh: their groups, the exchanges between them, their control values and their states."""
