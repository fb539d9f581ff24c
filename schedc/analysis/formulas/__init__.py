"""Formulas of times, memory and messages: measured exactly at many sizes, fitted, and verified at others."""
