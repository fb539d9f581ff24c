"""Who takes part in a step: the ranks of a mesh, their groups, their control values, and how they are."""
