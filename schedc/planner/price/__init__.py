"""Prices plans: tables of part times for many of them, and one of them as files that the compiler checks."""
