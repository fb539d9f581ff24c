"""What a backward finds in memory: what is held from the forward, what is worked out again, and how many bytes."""
