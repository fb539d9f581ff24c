"""From the tree of a schedule and its sizes to a `Schedule`, over all ranks and iterations at once."""

from schedc.elaborate.schedule import elaborate

__all__ = ["elaborate"]
