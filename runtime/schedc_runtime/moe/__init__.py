"""Mixture of experts over several ranks: routing, exchanges, experts."""
