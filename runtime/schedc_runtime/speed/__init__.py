"""Finds ranks that have become slower, from the processor time of their instructions."""
