"""Predicts how long a training step takes, under many constants: products, exchanges, and a schedule's order."""
