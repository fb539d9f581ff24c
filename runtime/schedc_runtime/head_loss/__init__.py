"""Head and loss of a language model in one, chunk by chunk: the logits of a microbatch are never there at once."""
