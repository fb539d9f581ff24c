"""What the planner searches with: models, clusters, and what a model's layers hold and compute."""
