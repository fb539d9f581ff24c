"""Models on the meta device: their construction is recorded, and each rank makes the tensors that it holds."""
