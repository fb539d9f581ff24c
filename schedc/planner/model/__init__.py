"""Reads the sizes of a model: from TOML, and as a Hugging Face ``config.json`` says them."""
