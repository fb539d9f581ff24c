"""The state of all stages: gathered, loaded, copied beside a step, reported."""
