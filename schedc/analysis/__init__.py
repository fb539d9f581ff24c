"""Analyses that leave a schedule as it is: dependencies, timeline, memory, deadlock, claims."""
