"""What a trainer embeds: `Pipeline`, and how it is built from a model, a program and a mesh."""
