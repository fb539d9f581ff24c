"""Libraries that carry rows of experts in place of torch's transport: the seam, its checks, and adapters."""
