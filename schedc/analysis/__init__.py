"""What can be told about a schedule without changing it: dependencies, timeline, memory, deadlock, claims."""
