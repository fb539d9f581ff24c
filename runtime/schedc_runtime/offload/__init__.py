"""Moves what a microbatch holds between its forward and its backward to host memory, and back."""
