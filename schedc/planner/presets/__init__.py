"""Models and clusters that ship with the planner, as files in their own formats, each figure with its source."""
