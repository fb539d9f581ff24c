"""Digests of plans: what searches and predictions say of them to the last bit, and their files (see digests.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from digest_commands import invoke
from digest_values import sha

SEARCHES = (
    "gpt2 h100 -D devices=8 --batch 32x1024",
    "gpt2-xl a100-80 -D devices=16 --batch 64x1024 --precision fp16",
    "gpt2-xl a100-80 -D devices=16 --batch 64x1024 --require 'pp >= 4' --objective memory",
    "llama-3.1-8b h100 -D devices=64 --batch 512x4096",
    "llama-3.1-8b mi300x -D devices=32 --batch 256x4096 --require 'pp >= 2 and zero <= 1'",
    "llama-3.1-70b h200 -D devices=64 --batch 256x4096 --require 'pp >= 4' --exclude 'zero == 3'",
    "qwen3-8b b200 -D devices=16 --batch 64x8192 --precision fp8",
    "mixtral-8x7b h100 -D devices=32 --batch 128x4096 --require 'pp >= 2' --skew 1.3",
    "gpt-oss-20b h100 -D devices=16 --batch 64x4096 --require 'pp >= 2'",
    "deepseek-v3 h800 -D devices=256 --batch 512x4096 --require 'pp == 16 and tp == 1 and ep == 16'",
)
"""Searches of `TOP` plans each."""

TOP = 20

EXPLAINED = (
    f"{SEARCHES[0]} --explain pp=4,schedule=zbh1",
    f"{SEARCHES[3]} --explain tp=2,pp=4,recompute=full",
)

PREDICTED = ("bloom", "korthikanti", "mbridge_26_04_01", "mindspeed_rc2", "zerobubble_t4")
"""Tables of measured steps among those of the benchmarks."""


def cases(root: Path) -> Iterator[tuple[str, str]]:
    """(case, sha256); ``root``: the checkout whose tables of measured steps are read."""
    for line in SEARCHES:
        ran = invoke(f"plan {line} --top {TOP} --json -o out --force")
        answer = json.loads(ran.stdout)
        yield f"{line}: certificate", sha(ran.status, in_hex(answer["certificate"]))
        yield from ((f"{line}: {json.dumps(plan['axes'])}", sha(in_hex(plan))) for plan in answer["plans"])
        files = ((file, digest) for file, digest in ran.files.items() if file.endswith((".sched", ".toml")))
        yield from ((f"{line} > {file}", digest) for file, digest in files)
    for line in EXPLAINED:
        yield line, sha(in_hex(json.loads(invoke(f"plan {line} --top 1 --json").stdout)["explain"]))
    for name in PREDICTED:
        table = next(root.glob(f"benchmarks/**/{name}.csv"))
        yield f"predicted {name}", sha(in_hex(json.loads(invoke(f"plan --predict {table} --json").stdout)))


def in_hex(value: Any) -> str:
    """A value of JSON as a text that tells each double from all others."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {in_hex(part)}' for key, part in value.items())}}}"
    return f"[{', '.join(map(in_hex, value))}]" if isinstance(value, list) else repr(value)
