"""Names the rank, link or circle for which all other ranks wait."""
