"""The plans of a model on a cluster: axes, sizes of schedules, and conditions."""
