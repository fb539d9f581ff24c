"""What a model holds and computes, part by part: parameters, FLOPs of a forward, and tensors kept for the backward."""
