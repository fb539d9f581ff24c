"""What operations and messages cost."""
