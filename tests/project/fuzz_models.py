"""Models and clusters for the fuzzer: configurations and files with values of other kinds, sizes and places."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from functools import cache
from random import Random

from support.paths import ROOT

_ODD = (
    None,
    -1,
    0,
    1,
    3,
    2**31,
    2**63,
    10**400,
    1.5,
    1e300,
    "x",
    "",
    [],
    {},
    [[]],
    [0, 1],
    True,
    "silu",
    '\x7f"\\',
    "é🙂",
)
_KEYS = (
    "sliding_window", "layer_types", "linear_attn_config", "num_experts", "n_group", "topk_group", "mlp_only_layers",
    "moe_layer_freq", "use_sliding_window", "head_dim", "q_lora_rank", "model_type", "auto_map", "hidden_act", "\x00",
)  # fmt: skip
_CELLS = (
    "", "0", "1", "-1", "3", "8", "4096", "1e6", "1e400", "nan", "inf", "0.5", "800 ms", "99999999999999", "full",
    "zb_auto", "dualpipev", "interleaved_1f1b", "none", "fp8", "h100", "../x", "\x00", "é", '"', "x" * 3000, "10%",
    "True", "1,5",
)  # fmt: skip
Mutate = Callable[[Random, str], str]


@cache
def _texts(folder: str, suffix: str) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).glob(f"*.{suffix}")))


def model(draw: Random, mutate: Mutate) -> str:
    """A ``config.json`` or a model file: mostly of right form, with a few wrong values."""
    if draw.random() < 0.3:
        return changed_settings(draw, draw.choice(_texts("schedc/planner/presets/models", "toml")), mutate)
    text = draw.choice(_texts("tests/data/models", "json"))
    if draw.random() < 0.2:
        return mutate(draw, text)
    values = json.loads(text)
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        key = draw.choice((*values, *_KEYS)) if values else "model_type"
        if draw.random() < 0.25:
            values.pop(key, None)
        else:
            values[key] = draw.choice(_ODD) if draw.random() < 0.7 else draw.randint(1, 200)
    return json.dumps(values, indent=draw.choice((None, 1)), ensure_ascii=draw.random() < 0.5)


def cluster(draw: Random, mutate: Mutate) -> str:
    return changed_settings(draw, draw.choice(_texts("schedc/planner/presets/clusters", "toml")), mutate)


def rows(draw: Random, mutate: Mutate) -> str:
    """A head and a few measured steps: cells of other kinds and sizes, columns and lines that are missing or twice."""
    lines = draw.choice(_texts("benchmarks/published", "csv")).splitlines()
    body = list(csv.reader([lines[0], *draw.choices(lines[1:], k=draw.choice((1, 2, 4)))]))
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        line, cell = draw.randrange(len(body)), draw.randrange(len(body[0]))
        kind = draw.randrange(8)
        if kind == 0:
            body = [[*cells[:cell], *cells[cell + 1 :]] for cells in body]
        elif kind == 1:
            body.insert(line, list(body[line]))
        elif cell < len(body[line]):
            body[line][cell] = draw.choice(_CELLS) if kind < 6 else draw.choice(draw.choice(body) or [""])
        if not body[0]:
            break
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(body)
    return mutate(draw, text.getvalue()) if draw.random() < 0.2 else text.getvalue()


def fit(draw: Random, mutate: Mutate) -> str:
    return changed_settings(draw, draw.choice(_texts("benchmarks/published", "fit.toml")), mutate)


def changed_settings(draw: Random, text: str, mutate: Mutate) -> str:
    """A TOML text with lines left out, doubled or moved, or with other values."""
    if draw.random() < 0.2:
        return mutate(draw, text)
    lines = text.splitlines()
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        at = draw.randrange(len(lines))
        kind = draw.randrange(4)
        if kind == 0:
            del lines[at : at + draw.choice((1, 1, 5))]
        elif kind == 1:
            lines.insert(draw.randrange(len(lines) + 1), lines[at])
        elif "=" in lines[at]:
            value = draw.choice(
                ("0", "-1", "nan", "inf", "1e400", "8", "4096", "true", '"x"', "[]", "[1]", "{}", "1e-9")
            )
            lines[at] = f"{lines[at].partition('=')[0]}= {value}"
        if not lines:
            break
    return "\n".join(lines)
