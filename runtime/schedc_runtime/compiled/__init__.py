"""Compiled units: torch.compile with a backend that cuts each backward graph into one for I and one for W."""
