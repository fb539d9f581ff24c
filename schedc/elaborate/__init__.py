"""Makes a `Schedule` from the tree of a schedule and its sizes, over all ranks and iterations at once."""

from schedc.elaborate.schedule import elaborate

__all__ = ["elaborate"]
