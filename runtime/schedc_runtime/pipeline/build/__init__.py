"""How a pipeline is built: from a model, a program and a mesh to stages with bound code."""
