"""Infers the text of a schedule from its orders at several sizes, and proves what the text claims."""
