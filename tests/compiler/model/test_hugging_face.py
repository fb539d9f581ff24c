"""Parameters of models, layer by layer, against the modules that Hugging Face makes of the same configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from schedc.model.counts import model_parameters
from schedc.planner.model.config import parse_config
from schedc.source import Source
from support.needs import needed
from support.paths import ROOT

pytestmark = pytest.mark.slow

CONFIGS = ROOT / "tests" / "data" / "models"
HUGGING_FACE = [path for path in sorted(CONFIGS.glob("*.json")) if path.stem != "pangu-ultra-moe-718b"]


@pytest.mark.parametrize("path", HUGGING_FACE, ids=lambda path: path.stem)
def test_parameters_are_those_of_hugging_face(path: Path) -> None:
    """Every width is the model's own. Five layers are enough: dense and MoE layers are among these."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = 5
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:5]
    model_type = config["model_type"].replace("kimi_k2", "deepseek_v3")
    left_out = ("auto_map", "model_type", "quantization_config")
    transformers = needed("transformers")
    sizes = transformers.CONFIG_MAPPING[model_type](**{k: v for k, v in config.items() if k not in left_out})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(sizes)
    counts = model_parameters(parse_config(Source("config.json", json.dumps(config))))
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    for number, layer in enumerate(counts.layers):
        held = model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.h
        assert sum(layer.values()) == sum(parameter.numel() for parameter in held[number].parameters())
