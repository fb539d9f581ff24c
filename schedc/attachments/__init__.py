"""What a plan attaches to a schedule, as values, and the rows, bytes and FLOPs that follow from them."""
