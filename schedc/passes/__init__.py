"""What turns one IR into the next; one file per pass."""
