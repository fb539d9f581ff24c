"""Explains the codes of family S7: models and clusters that `schedc plan` reads."""

from __future__ import annotations

from functools import partial

from schedc.codes.base import DiagnosticCode

_SIZES = '"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100'
_LLAMA = f'{{"model_type": "llama", "num_hidden_layers": 2, {_SIZES}}}\n'
_MOE = f"""{{"model_type": "qwen3_moe", "num_hidden_layers": 2, {_SIZES}, "num_key_value_heads": 2,
 "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}}
"""
_CLUSTER = """schema = "schedc.cluster/1"
devices = 16
per_node = 8
[device]
peak = { bf16 = 989e12 }
sms = 132
hbm_bytes = 80_000_000_000
hbm_Bps = 3.35e12
usable = 0.92
[[level]]
name = "nvlink"
size = 8
alpha_s = 3e-6
Bps = 450e9
[[level]]
name = "network"
alpha_s = 8e-6
Bps = 50e9
nics = 8
"""
_config = partial(DiagnosticCode, file="config.json")
_cluster = partial(DiagnosticCode, file="cluster.toml", right=_CLUSTER)

S7: tuple[DiagnosticCode, ...] = (
    _config(
        "S701",
        "a model file that cannot be used",
        "A model is a `config.json` of Hugging Face, which is one JSON object, or a TOML text with schema = "
        '"schedc.model/1". Its numbers are finite, each key stands once, and it has at most 1 MB. The message says '
        "what the text is instead.",
        wrong='{"model_type": "llama", "num_hidden_layers": NaN}\n',
        right=_LLAMA,
    ),
    _config(
        "S702",
        "a size of a model that is missing, or that is none",
        "Sizes of a model are whole numbers: layers, columns, heads, experts. Those that decide what it computes have "
        "no default. A value of another kind is refused, and so is one that no model has. Some keys have more than one "
        "name in `config.json`; the message has all names.",
        wrong=_LLAMA.replace('"num_hidden_layers": 2', '"num_hidden_layers": [2]'),
        right=_LLAMA,
    ),
    _config(
        "S703",
        "sizes of a model that contradict each other",
        "Each size is legal alone. Together they describe no model. A token takes more experts than there are; heads "
        "of keys do not divide those of queries; a dense layer has no columns; or experts belong to no layer.",
        wrong=_MOE.replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 9'),
        right=_MOE,
    ),
    _config(
        "S704",
        "a model with unknown computations",
        "Parameters, FLOPs and bytes are counted for the model types that the message lists. A key that none of them "
        "has may change what a step computes, such as linear attention or a state space. It is refused by its name, "
        "because a count without it would be wrong. Keys that change no count, such as token ids and the scaling of "
        "rotary positions, are skipped. Code that `auto_map` names is never run.",
        wrong=_LLAMA.replace('"llama"', '"llama", "linear_attn_config": {}'),
        right=_LLAMA,
    ),
    _cluster(
        "S705",
        "a cluster file that cannot be used",
        'A cluster is a TOML text with schema = "schedc.cluster/1" and at most 1 MB. The message says whether it '
        "cannot be read, is not TOML, or does not name that schema.",
        wrong=_CLUSTER.replace("cluster/1", "cluster/9"),
    ),
    _cluster(
        "S706",
        "a figure of a cluster that is missing, or that is none",
        "Speeds are in FLOP/s and bytes per second, memory is in bytes, and latency in seconds. All are above zero. "
        "`usable` is a share of the memory, 1 at most. `docs/guide/planner.md` lists all keys.",
        wrong=_CLUSTER.replace("Bps = 450e9", "Bps = 0"),
    ),
    _cluster(
        "S707",
        "devices, nodes and levels that contradict each other",
        "Devices come in whole nodes. Levels of the network go from the innermost to the outermost: each has a "
        "multiple of the devices of the one inside it, and the last one reaches all devices.",
        wrong=_CLUSTER.replace('"network"', '"network"\nsize = 4'),
    ),
    DiagnosticCode(
        "S708",
        "a cluster without the peak of a precision",
        "A step is priced by the peak of the precision of its products. The cluster file gives peaks for some of bf16, "
        "fp16, fp8 and fp4 only. No other peak is taken in its place. Raised where a plan asks for it.",
    ),
    DiagnosticCode(
        "S709",
        "an unknown model or cluster",
        "A model is a shipped name, a file, or a folder with a `config.json`. A cluster is a shipped name or a file. "
        "`schedc plan list` has the shipped ones. Raised by `schedc plan`.",
    ),
    DiagnosticCode(
        "S711",
        "a condition on plans that cannot be read",
        "`--require` and `--exclude` take a comparison of axes with numbers or names, such as `pp >= 4`, "
        "`tp * pp <= 64` or `schedule in dualpipev, zbv`, joined by `and`, `or` and `not`. The message says which part "
        "is not understood. Raised by `schedc plan`.",
    ),
    DiagnosticCode(
        "S712",
        "a space without a legal plan",
        "Constraints are asked one after the other: products of ranks, the batch, the layers, the experts, conditions, "
        "and what schedules require. The message names the one that leaves no plan, and the help what is nearest. "
        "Plan files place layers without experts in front, so a model that has them elsewhere has no plan. "
        "Raised by `schedc plan`.",
    ),
    DiagnosticCode(
        "S713",
        "an unknown restriction",
        "`--restrict` takes the name of a shipped set of conditions, such as `megatron`. Raised by `schedc plan`.",
    ),
    DiagnosticCode(
        "S714",
        "a space of which no plan fits",
        "Every legal plan holds more than a device has, by a bound or by the peak of its order. The message names the "
        "plan whose bound is least. Raised by `schedc plan`.",
    ),
    DiagnosticCode(
        "S715",
        "a skew of rows that a model cannot have",
        "`--skew` says how many times the mean rows come to the fullest rank of an expert group. `--routing` takes "
        "the file of a recorded routing. A model without experts sends no rows, and no spread of loads skews a group "
        "beyond its experts. Raised by `schedc plan`.",
    ),
    DiagnosticCode(
        "S716",
        "a training run that no plan can do",
        "`--tokens` is less than a step has, or devices fail more often than a checkpoint and a restart take. `--mtbf` "
        "is of one device; the cluster fails as many times more often as it has devices. Or `--ramp` does not end at "
        "the batch, or a size of it is trained for less than a step. Raised by `schedc plan`.",
    ),
    DiagnosticCode(
        "S719",
        "a name that is neither a constant nor a figure of the cluster",
        "`--vary` takes a constant of the cost model such as `grouped`. It also takes a figure of the cluster such as "
        "`device.hbm_Bps`, or the name of a level of the network. Raised by `schedc plan`.",
    ),
)
