"""The commands of `benchmarks/trainers.py`, a module each."""
