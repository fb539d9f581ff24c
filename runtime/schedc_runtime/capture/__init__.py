"""What a graph of a whole step cannot hold, found on any device by running two steps and comparing their operations."""
