"""Experts that move between ranks: what belongs to them, how it travels, and where experts should lie."""
