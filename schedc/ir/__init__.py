"""The two IRs, `Schedule` and `Program`, their text forms and their invariants."""
