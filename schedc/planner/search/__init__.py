"""Finds the best plans of a space: a bound of all, orders under many costs, and the compiler's prices of the best."""
