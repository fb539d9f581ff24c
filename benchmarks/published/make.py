"""Makes the CSV files of this folder from collected published rows: `python make.py FOLDER_OF_COLLECTED_FILES`.

No figure is added here but sizes of models that their publishers print elsewhere; README.md has sources and licences.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent

CLUSTERS = {
    ("vtrain_multi", "A100-80GB-SXM"): "clusters/a100-800g.toml",
    ("vtrain_single", "A100-80GB-SXM"): "clusters/a100-800g.toml",
    ("korthikanti22_t5", "A100-80GB-SXM"): "a100-80",
    ("bloom_topology", "A100-80GB-SXM (Jean Zay, 4xOmniPath/node)"): "jean-zay-a100",
    ("zerobubble_t4", "A100-80GB-SXM (RoCE)"): "clusters/a100-roce.toml",
    ("zerobubble_t6", "A100-80GB-SXM (RoCE)"): "clusters/a100-roce.toml",
}
BY_HARDWARE = {
    "H100-80GB-SXM": "h100",
    "B200-SXM 180GB": "b200",
    "B300-SXM": "clusters/b300.toml",
    "GB200 NVL72": "gb200-nvl72",
    "GB300 NVL72": "clusters/gb300.toml",
    "Ascend 910B (Atlas 900 A2 PODc)": "ascend-910b",
}
"""Shipped clusters by name, others by file."""
PRECISIONS = {"fp8-cs": "fp8", "fp8-mx": "fp8", "mxfp8": "fp8", "nvfp4": "fp4", "fp16/bf16": "fp16"}
HEAD_DIMS = {"Qwen3-30B-A3B": 128, "Qwen3-235B-A22B": 128, "GPT-OSS-120B": 64, "Gemma-7B": 256, "Gemma-2B": 256}
"""Columns of a head where they are not hidden/heads: `head_dim` of the publishers' config.json."""
MLA = {"DeepSeek-V2": 1536, "DeepSeek-V3": 1536, "Kimi-K2": 1536}
"""`q_lora_rank` of the publishers' config.json; `kv_lora_rank` is 512, heads have 128 columns and 64 of rope."""
VOCABULARIES = {
    **dict.fromkeys(("LLaMA-7B", "LLaMA-13B", "LLaMA-33B", "LLaMA-65B", "Mistral-7B"), 32000),
    **dict.fromkeys(("LLaMA2-7B", "LLaMA2-13B", "LLaMA2-34B"), 32000),
    **dict.fromkeys(("Aquila-7B", "Aquila2-7B", "Aquila2-34B"), 100008),
    **dict.fromkeys(("Baichuan-7B", "Baichuan-13B", "Yi-34B"), 64000),
    **dict.fromkeys(("Baichuan2-7B", "Baichuan2-13B"), 125696),
    **dict.fromkeys(("InternLM-7B", "InternLM-65B"), 103168),
    "LLaMA3-8B": 128256,
    "Qwen-7B": 151936,
    "Qwen-14B": 152064,
    "Gemma-2B": 256000,
    **dict.fromkeys(("GPT-1.5B", "GPT-6.2B", "GPT-14.6B", "GPT-28.3B"), 32000),
}
"""`vocab_size` of the publishers' config.json, where the collected rows have none.

The zero-bubble papers print none. Sizes of 6.2, 14.6 and 28.3 billion leave 25,400 to 33,600 words, counted once, and
their code reads text with SentencePiece: 32,000.
"""
WINDOWS = {"Mistral-7B": 4096}
"""`sliding_window` of the publishers' config.json, of all layers."""
OLD_MEGATRON = (
    *("vtrain_multi", "vtrain_single", "bloom_topology", "korthikanti22_t5"),
    *("zerobubble_t4", "zerobubble_t6"),
)
"""Stacks of 2020 to 2023: scores of attention in memory, dropout, sums of gradients behind the last backward."""

COLUMNS = [
    "row_id",
    "model",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "head_dim",
    "v_dim",
    "q_lora",
    "kv_lora",
    "rope_dim",
    "window",
    "windowed",
    "seq",
    "vocab",
    "gated",
    "experts",
    "top",
    "width",
    "shared",
    "expert_bias",
    "first_dense",
    "cluster",
    "precision",
    "devices",
    "tp",
    "pp",
    "vpp",
    "dp",
    "ep",
    "cp",
    "zero",
    "microbatch",
    "batch",
    "schedule",
    "limit",
    "called",
    "recompute",
    "fused",
    "sequence_parallel",
    "overlap",
    "graphs",
    "attention_graphs",
    "chunked_tp",
    "hides_rows",
    "block_scales",
    "alltoall",
    "dropout",
    "grad_bytes",
    "step_s",
    "tokens_per_s_per_device",
    "peak_gib",
    "left_out",
    "source_ref",
]

FILES = {
    "vtrain_multi": "vtrain_multi",
    "vtrain_single": "vtrain_single",
    "bloom": "bloom_topology",
    "korthikanti": "korthikanti22_t5",
    "zerobubble_t4": "zerobubble_t4",
    "zerobubble_t6": "zerobubble_t6",
    "simumax_b200": "simumax_b200",
    "mindspeed_rc2": "mindspeed_rc2",
}
RELEASES = ("25.09", "25.11", "26.02", "26.02.01", "26.04", "26.04.01", "26.06", "26.06.01")
"""Release 26.08 has models with experts alone, and does not say how they were launched."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rows = []
    for name in ("published_throughput.csv", "published_throughput_vtrain_single.csv"):
        with (folder / name).open(encoding="utf-8", newline="") as file:
            rows += list(csv.DictReader(file))
    releases = {f"mbridge_{release.replace('.', '_')}": f"mbridge_{release}" for release in RELEASES}
    for name, source in (FILES | releases).items():
        written = [converted(row) for row in rows if row["source_id"] == source]
        with (HERE / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(written)
        print(f"{name}.csv: {len(written)} rows, {sum(bool(row['left_out']) for row in written)} left out")


def converted(row: dict[str, str]) -> dict[str, object]:
    """A collected row in the columns that `schedc fit` reads."""
    source, notes = row["source_id"], row["config_notes"]
    old = source in OLD_MEGATRON
    swa = "swa" in row["attn"]
    same = {
        name: row[name]
        for name in ["row_id", "model", "layers", "hidden", "ffn", "heads", "kv_heads", "seq", "source_ref"]
    }
    axes = {name: row[name] for name in ["tp", "pp", "vpp", "dp", "ep", "cp"]}
    name = re.sub(r" \(.*", "", row["model"])
    mla = next((q for start, q in MLA.items() if name.startswith(start)), None) if row["attn"] == "mla" else None
    measured = "step_s" if row["iter_time_s"] else "tokens_per_s_per_device"
    return {
        **same,
        "vocab": row["vocab"] or VOCABULARIES.get(name, ""),
        **axes,
        **schedule(row),
        "head_dim": 128 if mla else HEAD_DIMS.get(name, ""),
        "v_dim": 128 if mla else "",
        "q_lora": mla or "",
        "kv_lora": 512 if mla else "",
        "rope_dim": 64 if mla else "",
        "window": 128 if swa else WINDOWS.get(name, ""),
        "windowed": "all" if name in WINDOWS else "",
        "gated": int(not old),
        "experts": row["n_experts"],
        "top": row["topk"],
        "width": row["moe_ffn"],
        "shared": row["n_shared"],
        "expert_bias": int(name.startswith("GPT-OSS")),
        "first_dense": row["first_dense"],
        "cluster": CLUSTERS.get((source, row["hardware"])) or BY_HARDWARE[row["hardware"]],
        "precision": PRECISIONS.get(row["precision"], row["precision"].split("(")[0]),
        "devices": row["n_gpus"],
        "zero": {"": 0, "zero0": 0, "zero1": 1}.get(row["shard"], 3 if "fsdp" in row["shard"] else 0),
        "microbatch": row["mbs"],
        "batch": row["gbs"],
        "recompute": recompute(row["recompute"]),
        "fused": int(not old and ("use-flash-attn" in notes or source != "mindspeed_rc2")),
        "sequence_parallel": int("SP" in row["recompute"] or not old),
        "overlap": int("overlap-grad-reduce" in notes or source.startswith("mbridge")),
        "graphs": int("full_iteration" in notes),
        "attention_graphs": int("'attn'" in notes),
        "chunked_tp": int("use-mc2" in notes),
        "hides_rows": int("a2a_overlap=True" in notes),
        "block_scales": int(row["precision"] in ("mxfp8", "fp8-mx")),
        "alltoall": "hierarchical" if re.search("dispatcher=(deepep|hybridep)", notes) else "",
        "dropout": int(old),
        "grad_bytes": 4 if "fp32 grad" in row["precision"] or not old else 2,
        measured: row["iter_time_s"] or row["tokens_per_s_per_gpu"],
        "peak_gib": row["peak_mem_gib"],
        "left_out": reason(row),
    }


def schedule(row: dict[str, str]) -> dict[str, object]:
    """The library's schedule, and its name in the source."""
    called = row["schedule"].strip("-") or "1F1B"
    if called.lower() in ("zb-1p", "zb-2p"):
        return {"schedule": "zb_auto", "limit": int(called[3]) * int(row["pp"]), "called": called}
    named = {"1f1b": "1f1b", "zb-v": "zbv"}.get(called.lower(), "interleaved_1f1b")
    return {"schedule": named, "limit": "", "called": called}


def recompute(text: str) -> str:
    if text.startswith("full"):
        return "full"
    return "attention" if "selective" in text or "core_attn" in text else "none"


def reason(row: dict[str, str]) -> str:
    """Why a row is not used; empty if it is."""
    quality = row["quality"]
    if not row["layers"]:
        return "sizes of the model are not published"
    if not row["ffn"]:
        return "columns of the MLP are not published"
    if "duplicate" in quality or "suspect" in quality:
        return quality.replace(",", ";")
    if quality == "layers approximate":
        return "the number of layers is not published"
    if row["source_id"].startswith("mbridge") and row["n_experts"] and "cuda_graph=" not in row["config_notes"]:
        return "whether kernels are launched as graphs; and how rows travel to experts; are not published"
    if quality == "check":
        return "reported TFLOP/s contradict the step time by a factor of four"
    return ""


if __name__ == "__main__":
    main()
