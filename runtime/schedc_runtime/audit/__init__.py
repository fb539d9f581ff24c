"""Proof by replay: another rank repeats a microbatch, and bits that differ name the device that computes wrongly."""
