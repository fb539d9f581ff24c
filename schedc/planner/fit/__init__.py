"""Fits the constants of the cost model to measured steps, checks them on steps left out, and predicts with them."""
