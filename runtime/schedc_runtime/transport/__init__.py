"""Messages and collectives between ranks: over torch.distributed, or between all ranks of one process."""
