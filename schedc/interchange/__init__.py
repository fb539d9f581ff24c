"""A schedule in the formats of others."""
