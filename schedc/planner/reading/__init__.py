"""Reads files of people and of other tools: bounded texts, JSON and TOML, values with their places."""
