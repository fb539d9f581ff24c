"""Models and clusters from files: contents, faults with their places, and shipped files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from schedc.cli import main
from schedc.codes.s7_planner import _CLUSTER as CLUSTER
from schedc.diagnostics import DiagnosticError
from schedc.model.sizes import AttentionKind, LayerKind
from schedc.planner.cluster.read import parse_cluster, with_devices
from schedc.planner.cluster.values import PRECISIONS
from schedc.planner.model.config import parse_config
from schedc.planner.model.file import parse_model, write_model
from schedc.planner.model.read import load_model
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.presets.tables import files, tables
from schedc.source import Source
from support.paths import ROOT

CONFIGS = ROOT / "tests" / "data" / "models"


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def found(parse: Callable[[Source], object], text: str) -> list[tuple[str, int]]:
    """Code and line of each finding; each has a message, a place and a remedy."""
    with pytest.raises(DiagnosticError) as error:
        parse(Source("config.json", text))
    assert all(diagnostic.help and diagnostic.primary.span.column for diagnostic in error.value.diagnostics)
    return [diagnostic.position[:2] for diagnostic in error.value.diagnostics]


def config(name: str, **changes: Any) -> str:
    """A config with some of its values changed, one key per line; None takes a key out."""
    values = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8")) | changes
    return json.dumps({key: value for key, value in values.items() if value is not ...}, indent=1)


def line_of(text: str, key: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if f'"{key}"' in line)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '"llama"', "{'a': 1}", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e400}', '{"a": 1, "a": 2}',
     '{"a": ' + "9" * 5000 + "}", "[" * 100_000, '{"a": ' * 50_000],
)  # fmt: skip
def test_a_config_that_is_no_object_of_finite_numbers(text: str) -> None:
    assert found(parse_config, text) == [("S701", 1)]


CHANGES = [
    ("llama-3.1-8b", "num_hidden_layers", 0, "S702"),
    ("llama-3.1-8b", "num_hidden_layers", [32], "S702"),
    ("llama-3.1-8b", "num_hidden_layers", 10**9, "S702"),
    ("llama-3.1-8b", "hidden_size", "4096", "S702"),
    ("llama-3.1-8b", "hidden_size", True, "S702"),
    ("llama-3.1-8b", "hidden_size", 4096.5, "S702"),
    ("llama-3.1-8b", "vocab_size", -1, "S702"),
    ("llama-3.1-8b", "tie_word_embeddings", 1, "S702"),
    ("llama-3.1-8b", "num_attention_heads", 33, "S702"),
    ("llama-3.1-8b", "num_key_value_heads", 5, "S703"),
    ("mixtral-8x7b", "num_experts_per_tok", 9, "S703"),
    ("deepseek-v3", "n_group", 7, "S703"),
    ("deepseek-v3", "topk_group", 9, "S703"),
    ("deepseek-v3", "first_k_dense_replace", 61, "S703"),
    ("deepseek-v3", "first_k_dense_replace", 62, "S703"),
    ("qwen3-30b-a3b", "mlp_only_layers", [48], "S703"),
    ("qwen3-30b-a3b", "mlp_only_layers", "all", "S702"),
    ("llama-3.1-8b", "sliding_window", 4096, "S704"),
    ("llama-3.1-8b", "num_local_experts", 8, "S704"),
    ("llama-3.1-8b", "hidden_act", "erf_of_mine", "S702"),
    ("qwen3-8b", "use_sliding_window", 1, "S702"),
    ("qwen3-8b", "linear_attn_config", {"kernel": 4}, "S704"),
    ("gpt2", "add_cross_attention", True, "S704"),
    ("llama-3.1-8b", "model_type", "mamba2", "S704"),
    ("llama-3.1-8b", "model_type", 3, "S704"),
]


@pytest.mark.parametrize(("name", "key", "value", "code"), CHANGES, ids=lambda value: str(value)[:30])
def test_a_wrong_value_is_found_in_its_line(name: str, key: str, value: object, code: str) -> None:
    text = config(name, **{key: value})
    assert (code, line_of(text, key)) in found(parse_config, text)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts_per_tok", "moe_intermediate_size", "model_type"])
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(DiagnosticError, match=f"no `{key}`"):
        parse_config(Source("config.json", config("qwen3-235b-a22b", **{key: ...})))


def test_every_unknown_mechanism_of_an_unknown_model_is_named() -> None:
    text = config(
        "llama-3.1-8b", model_type="mine", mamba_d_state=16, attn_layer_period=8, auto_map={"AutoConfig": "x.Y"}
    )
    lines = [("S704", line_of(text, key)) for key in ("model_type", "mamba_d_state", "attn_layer_period")]
    assert sorted(found(parse_config, text)) == sorted(lines)


def test_names_of_keys_and_rules_of_layers() -> None:
    pangu = load_model(CONFIGS / "pangu-ultra-moe-718b.json")
    assert (pangu.attention.kind, pangu.attention.q_lora, pangu.norms, pangu.mtp) == (AttentionKind.MLA, 1536, 4, 1)
    assert pangu.kinds == (LayerKind.DENSE,) * 3 + (LayerKind.MOE,) * 58
    sparse = parse_config(Source("config.json", config("qwen3-30b-a3b", decoder_sparse_step=3, mlp_only_layers=[5])))
    assert [number for number in range(12) if sparse.kind_of(number) is LayerKind.MOE] == [2, 8, 11]
    deepseek = parse_config(Source("config.json", config("deepseek-v3", moe_layer_freq=2)))
    assert [number for number in range(8) if deepseek.kind_of(number) is LayerKind.MOE] == [4, 6]
    oss = load_model(CONFIGS / "gpt-oss-20b.json")
    assert (oss.window_of(0), oss.window_of(1)) == (128, 0)
    assert parse_config(Source("gpt-oss-20b.json", config("gpt-oss-20b", layer_types=...))) == oss
    assert load_model(CONFIGS / "gpt2.json").ffn == 3072


def test_a_model_file_reads_back_and_is_the_shipped_one() -> None:
    """The shipped models are the configurations in the form of model files."""
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(files("models"))
    for name in files("models"):
        model = load_model(CONFIGS / f"{name}.json")
        assert parse_model(Source(f"{name}.toml", write_model(model))) == model == open_model(name)


MODEL = 'schema = "schedc.model/1"\nlayers = 2\nhidden = 64\nvocab = 100\nheads = 4\nffn = 128\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layers = 2", ("S701", 1)),
        (MODEL.replace("model/1", "model/2"), ("S701", 1)),
        (MODEL.replace("= 64", "="), ("S701", 1)),
        (MODEL.replace("layers = 2", "layers = 0"), ("S702", 2)),
        (MODEL.replace("ffn", "fnn"), ("S702", 6)),
        (MODEL.replace("heads = 4", "heads = 3"), ("S702", 5)),
        (MODEL + "[attention]\nkind = 'linear'\n", ("S702", 8)),
        (MODEL + "[attention]\nwindow = 'all'\n", ("S702", 8)),
        (MODEL + "[moe]\nexperts = 8\nwidth = 32\n", ("S702", 1)),
        (MODEL + "[moe]\nexperts = 8\ntop = 9\nwidth = 32\n", ("S703", 9)),
        (MODEL + "gated = false\n[moe]\nexperts = 8\ntop = 2\nwidth = 32\n", ("S703", 7)),
        (MODEL.replace("ffn = 128\n", ""), ("S703", 1)),
    ],
)
def test_a_wrong_model_file(text: str, expected: tuple[str, int]) -> None:
    assert expected in found(parse_model, text)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("cluster/1", "model/1", ("S705", 1)),
        ("devices = 16", "devices = 16 17", ("S705", 1)),
        ("devices = 16", "devices = 15", ("S707", 2)),
        ("devices = 16", "devices = 0", ("S706", 2)),
        ("[device]", "[gpu]", ("S706", 1)),
        ("bf16 = 989e12", "", ("S706", 5)),
        ("bf16 = 989e12", "bf8 = 1", ("S706", 5)),
        ("bf16 = 989e12", "bf16 = -1", ("S706", 5)),
        ("usable = 0.92", "usable = 1.5", ("S706", 9)),
        ("hbm_Bps = 3.35e12", "hbm_Bps = nan", ("S706", 8)),
        ("Bps = 450e9", "Bps = 0", ("S706", 14)),
        ("Bps = 50e9", "Bps = 'fast'", ("S706", 18)),
        ("size = 8", "", ("S706", 1)),
        ("alpha_s = 8e-6", "alpha_s = 8e-6\nsize = 4", ("S707", 18)),
        ("alpha_s = 8e-6", "alpha_s = 8e-6\nsize = 12", ("S707", 18)),
        ("alpha_s = 8e-6", "alpha_s = 8e-6\nsize = 8", ("S707", 18)),
        ("nics = 8", "nic = 8", ("S706", 19)),
    ],
)  # fmt: skip
def test_a_wrong_cluster_file(old: str, new: str, expected: tuple[str, int]) -> None:
    assert CLUSTER.count(old) == 1
    assert expected in found(parse_cluster, CLUSTER.replace(old, new))


def test_a_cluster_has_levels_speeds_and_another_size() -> None:
    cluster = parse_cluster(Source("cluster.toml", CLUSTER))
    inside, outside = cluster.levels
    assert (cluster.level_over(8), cluster.level_over(9)) == (inside, outside)
    assert (cluster.device_Bps(inside), cluster.device_Bps(outside)) == (450e9, 50e9)
    assert with_devices(cluster, 4096).levels[-1].size == 4096
    assert cluster.peak("bf16") == 989e12
    with pytest.raises(DiagnosticError) as error:
        cluster.peak("fp8")
    assert error.value.diagnostics[0].position == ("S708", 5, 1)
    with pytest.raises(DiagnosticError, match="15 devices are not a multiple of 8"):
        with_devices(cluster, 15)
    assert open_cluster("gb200-nvl72", 2048).levels[-1].size == 72 * 29
    assert open_cluster("jean-zay-a100").device_Bps(open_cluster("jean-zay-a100").levels[-1]) == 12.5e9 / 2


def test_each_figure_of_a_shipped_cluster_has_a_source() -> None:
    for name in files("clusters"):
        table = tables("clusters")[name]
        named = {
            "devices",
            "per_node",
            *(table["device"].keys() - {"name"}),
            *(each["name"] for each in table["level"]),
            *({"alike"} & table.keys()),
        }
        assert set(table["sources"]) == named
        assert all(len(source) > 6 for source in table["sources"].values())
        assert set(open_cluster(name).device.peak) <= set(PRECISIONS)


def test_the_command_prints_counts_and_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    facts = json.loads(schedc("show", "deepseek-v3", "h800", "-D", "devices=2048", "--json").stdout)
    assert facts["parameters"]["total"] == sum(facts["parameters"]["parts"].values()) - facts["parameters"]["mtp"]
    runs = facts["parameters"]["layers"]
    assert [(run["first"], run["last"], run["kind"]) for run in runs] == [
        (0, 2, "dense"),
        (3, 60, "moe"),
        (61, 61, "mtp"),
    ]
    assert facts["cluster"]["levels"][1]["size"] == 2048
    assert "671 B parameters" in schedc("show", "deepseek-v3").stdout
    (tmp_path / "config.json").write_text(config("qwen3-8b"))
    assert json.loads(schedc("show", str(tmp_path), "--json").stdout)["model"]["name"] == tmp_path.name
    large = tmp_path / "large.json"
    large.write_bytes(b" " * 1_000_001)
    for path, text in ((large, "more than 1,000,000 bytes"), (tmp_path / "x", "Is a directory")):
        (tmp_path / "x" / "config.json").mkdir(parents=True, exist_ok=True)
        result = schedc("show", str(path))
        assert (result.exit_code, "error[S701]" in result.stderr, text in result.stderr) == (1, True, True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("show", "deepseek-v4"), "did you mean `deepseek-v3`"),
        (("show", "deepseek-v3", "h8000"), "error[S709]"),
        (("show", "deepseek-v3", "-D", "devices=8"), "needs a CLUSTER"),
        (("show", "deepseek-v3", "h800", "-D", "P=8"), "no size 'P'"),
        (("show", "deepseek-v3", "h800", "-D", "devices=0"), "one device"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], text: str) -> None:
    result = schedc(*arguments)
    assert (result.exit_code, text in result.stderr) == (2, True), result.stderr
