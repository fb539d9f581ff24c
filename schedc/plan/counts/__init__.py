"""The figures that follow from the values of a plan: layers by level, rows that travel, heads, parameters."""
