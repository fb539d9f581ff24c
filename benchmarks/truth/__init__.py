"""The words of `planner_truth`, a file each: what the planner is compared with."""
