"""Pictures of a schedule."""
