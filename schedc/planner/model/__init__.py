"""The sizes of a model: as values, as TOML, and as a Hugging Face ``config.json`` says them."""
