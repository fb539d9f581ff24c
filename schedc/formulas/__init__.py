"""Formulas of times, memory and messages: exact at many sizes, fitted, and decided for all costs at each."""
