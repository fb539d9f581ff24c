"""Better orders of the same ops: searched under a cap on memory, with a proven lower bound (docs/guide/tuning.md)."""
