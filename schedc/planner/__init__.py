"""What the planner searches with: models, clusters, spaces of plans, and the times of steps."""
