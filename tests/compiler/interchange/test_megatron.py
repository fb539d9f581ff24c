"""Flags of Megatron for a schedule, its layout and its plan, and what Megatron cannot take."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from schedc.cli import main
from support.plan_cases import written


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_megatron_flags() -> None:
    def flags(*arguments: str) -> list[str]:
        result = schedc("export", *arguments, "--to", "megatron")
        assert result.exit_code == 0, result.output
        return [line for line in result.stdout.splitlines() if not line.startswith("#")]

    assert flags("1f1b", "-D", "P=8") == ["--pipeline-model-parallel-size 8"]
    interleaved = [
        "--pipeline-model-parallel-size 4",
        "--num-virtual-stages-per-pipeline-rank 3",
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
    ]
    assert flags("interleaved_1f1b", "-D", "v=3") == interleaved
    placed = flags("interleaved_1f1b", "-D", "P=2", "--layout", "E t*3|tt,noop|tt|ttmL")
    assert placed == [
        "--pipeline-model-parallel-size 2",
        "--num-layers 9",
        "--mtp-num-layers 1",
        '--pipeline-model-parallel-layout "Ettt|tt|tt|ttmL"',
        "--microbatch-group-size-per-virtual-pipeline-stage 2",
    ]
    assert flags("interleaved_overlap", "-D", "v=3") == [*interleaved, "--overlap-moe-expert-parallel-comm"]


SPREAD = """layers 4  experts 8 top 2  {parallel}
  {batch}"""


def test_megatron_flags_of_a_plan_that_spreads_a_step(tmp_path: Path) -> None:
    """The names are those of `megatron/training/arguments.py`; Megatron needs the sequence split beside experts."""

    def export(parallel: str, batch: str = "batch 32 x 128 by 2") -> Result:
        return schedc("export", written(tmp_path, SPREAD.format(parallel=parallel, batch=batch)), "--to", "megatron")

    lines = export("parallel tp 2 of attention cp 2 ep 8 dp 4 zero 1").stdout.splitlines()
    assert lines[1:6] == [
        "# Flags of Megatron-LM with megatron-core 0.16.1.",
        "# For 32 processes.",
        "# The model needs flags that no plan says: activation, norms, positions, vocabulary, tied tables.",
        "# Windows and sinks of attention need flags, too, where the model has some.",
        "# Before Blackwell, tp and cp need CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment.",
    ]
    assert lines[9:] == [
        "--num-experts 8 --moe-router-topk 2",
        "--moe-grouped-gemm",
        "--moe-token-dispatcher-type alltoall",
        "--tensor-model-parallel-size 2",
        "--sequence-parallel",
        "--context-parallel-size 2",
        "--expert-model-parallel-size 8",
        "--expert-tensor-parallel-size 1",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce --overlap-param-gather",
        "--micro-batch-size 2",
        "--global-batch-size 32",
        "--seq-length 128",
    ]
    assert "--overlap-grad-reduce\n" in export("parallel ep 4 dp 4").stdout
    alone, experts = (export(f"parallel tp 4 of attention ep {ep} dp 1 zero 1", "batch 8 x 128 by 2") for ep in (4, 2))
    assert "--use-distributed-optimizer\n--micro-batch-size" in alone.stdout
    assert "--overlap-grad-reduce --overlap-param-gather" in experts.stdout
    assert "--expert-tensor-parallel-size 2" in export("parallel tp 2 ep 4 dp 4").stdout
    assert "S607" in export("parallel dp 4 zero 3").stderr


def test_what_only_comments_of_a_plan_say_is_kept(tmp_path: Path) -> None:
    path = Path(written(tmp_path, "layers 4  tokens 128 dtype bf16", "1f1b(P = 2, M = 4)"))
    assert "# From" not in schedc("export", str(path), "--to", "megatron").stdout
    path.write_text(path.read_text().replace("plan ", "## Times of products in fp8; no line says it.\nplan ", 1))
    lines = schedc("export", str(path), "--to", "megatron").stdout.splitlines()
    assert "# From its comment: Times of products in fp8; no line says it." in lines
    assert "# From" not in schedc("export", "1f1b", "--to", "megatron").stdout


LATENT = """layout "Et|tt|tt|tmL" dense 1
  experts 16 top 2 groups 4 limit 2 shared 1 width 16 hidden 64
  block heads 4 head 16 inner 96 query 24 latent 16 rotary 8 sequence 128
  topology nodes 2 x 8  tokens 128 dtype bf16  alltoall hierarchical"""
PAIRS = "interleaved_overlap(P = 2, M = 4, v = 2)"
LOOP = "interleaved_1f1b(P = 2, M = 4, v = 2)"


def test_sizes_and_levels_of_a_plan_have_flags(tmp_path: Path) -> None:
    result = schedc("export", written(tmp_path, LATENT + "  recompute full", LOOP), "--to", "megatron")
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("# ") and "norms of" in line] == [
        "# Megatron holds the outputs of norms of narrow vectors, which the plan recomputes."
    ]
    assert [line for line in lines if not line.startswith("#")][5:] == [
        "--hidden-size 64",
        "--num-attention-heads 4",
        "--multi-latent-attention --kv-lora-rank 16",
        "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16",
        "--q-lora-rank 24",
        "--ffn-hidden-size 96",
        "--swiglu",
        "--num-experts 16 --moe-router-topk 2",
        "--moe-router-num-groups 4 --moe-router-group-topk 2",
        "--moe-ffn-hidden-size 16",
        "--moe-shared-expert-intermediate-size 16",
        '--moe-layer-freq "([0]*1+[1]*5)"',
        "--moe-grouped-gemm",
        "--moe-token-dispatcher-type flex",
        "--moe-flex-dispatcher-backend deepep",
        "--bf16",
        "--recompute-granularity selective --recompute-modules layernorm moe mlp",
    ]


GROUPED = "experts 8 top 2 width 16 hidden 64  tokens 128 dtype {}"
EIGHT = 'layout "Et|t|t|tL" dense 0'


@pytest.mark.parametrize(("layout", "notes"), [("Et|tt|tt|ttL", 1), ("Et|t|t|L", 0)])
def test_dense_layers_of_a_plan_without_sizes_of_experts_are_a_comment(tmp_path: Path, layout: str, notes: int) -> None:
    result = schedc("export", written(tmp_path, f'layout "{layout}" dense 3', LOOP), "--to", "megatron")
    flag = '# Experts, whose sizes no line says, need --moe-layer-freq "([0]*3+[1]*4)" beside --num-experts.'
    assert result.stdout.splitlines().count(flag) == notes
    assert result.stdout.count("moe-layer-freq") == notes


@pytest.mark.parametrize(
    ("lines", "head", "said"),
    [
        (LATENT + "  recompute act", LOOP, "error[S607]: Megatron does not recompute `act` of these layers"),
        (LATENT + "  recompute medium", LOOP, "does not recompute `medium` of these layers"),
        (LATENT + "  recompute chunk 0 layer", LOOP, "does not recompute levels that differ between layers"),
        (f"{EIGHT} {GROUPED.format('bf16')}  recompute act adaptive(2.0)", LOOP, "does not recompute adaptive levels"),
        (LATENT + "  overlap auto  recompute layer", PAIRS, "has no overlapped pairs with `recompute layer`"),
        ("layers 4  experts 8 top 2  parallel dp 2", PAIRS, "has no overlapped pairs with layers without expert ranks"),
        (LATENT.replace("hierarchical", "allgather"), PAIRS, "has no overlapped pairs with rows that are gathered"),
        (LATENT.replace("2 x 8", "4 x 4"), LOOP, "has no hierarchical exchange over nodes of 4 ranks"),
        (f"{EIGHT} {GROUPED.format('fp32')}", LOOP, "has no grouped products of experts in fp32"),
        ("layers 4  parallel cp 8 dp 1  batch 4 x 72", "1f1b(P = 2, M = 4)", "cannot share 72 tokens among 8 context"),
        ('layout "Et|tttm||L"', LOOP, "predictions on a chunk that is not the last of its rank"),
        (
            f"{EIGHT} {GROUPED.format('bf16')}  topology nodes 1 x 4  hot 1",
            LOOP,
            "error[S614]: Megatron has no flag for the `hot` line",
        ),
        (f"{EIGHT} {GROUPED.format('bf16')}  products loop", LOOP, "no flag for the `products` line"),
        (f"{EIGHT} {GROUPED.format('bf16')}  fuse auto", LOOP, "no flag for the `fuse` line"),
    ],
)
def test_what_megatron_cannot_say_is_refused(tmp_path: Path, lines: str, head: str, said: str) -> None:
    result = schedc("export", written(tmp_path, lines, head), "--to", "megatron")
    assert (result.exit_code, said in result.stderr) == (1, True), result.output


@pytest.mark.parametrize(
    ("layout", "status", "said"),
    [
        ("Et|tL", 1, "the layout has 2 stages, 1f1b has 4"),
        ("Et|t|m|mL", 1, "multi-token predictions in several stages"),
        ("Ex|t|t|L", 2, "error[S140]"),
    ],
)
def test_a_layout_that_megatron_cannot_take(layout: str, status: int, said: str) -> None:
    result = schedc("export", "1f1b", "--to", "megatron", "--layout", layout)
    assert result.exit_code == status
    assert said in result.stderr
    assert schedc("export", "1f1b", "--to", "csv", "--layout", layout).exit_code == 2
