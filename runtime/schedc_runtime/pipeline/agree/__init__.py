"""What all ranks agree on: program, model, batch, settings and failures."""
