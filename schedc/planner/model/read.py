"""Reads a model from a file of either form: a ``config.json`` of Hugging Face, or a model file in TOML."""

from __future__ import annotations

from pathlib import Path

from schedc.model.sizes import ModelSizes
from schedc.planner.model.config import parse_config
from schedc.planner.model.file import parse_model
from schedc.planner.reading.texts import read_source


def load_model(path: Path) -> ModelSizes:
    """The model of a file. Raises `DiagnosticError` (S701 to S704).

    A text that begins like JSON, or whose name ends like it, is a ``config.json``; every other is TOML.
    """
    source = read_source(path, "S701", "model")
    is_json = path.suffix == ".json" or source.text.lstrip().startswith("{")
    return parse_config(source) if is_json else parse_model(source)
