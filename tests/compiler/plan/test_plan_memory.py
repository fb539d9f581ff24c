"""The memory of a plan: what fills a rank at its peak, the worst routing included, and what would be enough."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.compiler import analyse
from schedc.diagnostics import DiagnosticError, render
from schedc.ir.plan import Plan
from schedc.model.counts import layer_parameters as layer_counts
from schedc.model.counts import without_experts
from schedc.plan import (
    ExpertSizes,
    Level,
)
from schedc.plan.counts.layers import moe_layer
from schedc.plan.counts.parameters import expert_parameters, expert_share, layer_parameters
from schedc.plan.counts.split_ranks import kept_gathered
from schedc.plan.gathered_memory import with_gathered
from schedc.plan.held_memory import most_held, running_memory
from schedc.plan.layout.parts import PartKind
from schedc.plan.writer import read_plan
from schedc.planner.presets.library import open_model
from schedc.planner.price.plan_lines import model_lines
from schedc.report.check import to_json as report
from schedc.report.check import to_text
from schedc.step.costs.costs import Costs
from schedc.units import digits, shown
from support.paths import ROOT
from support.plan_cases import written

BYTES = "layers 8 dense 1 experts 64 top 8 shared 1 width 1408 hidden 2048 topology nodes 2 x 4 tokens 4096 "
BYTES += "parameters moe 1200 MB dense 200 MB activations dense 300 MB"


def test_memory_in_bytes_and_what_fills_it(tmp_path: Path) -> None:
    """One rank of 1F1B holds a microbatch for each rank behind it: worked out by hand from the closed forms."""
    moe = ExpertSizes(64, 8, 1, 1, 1, 1408, 2048)
    # Two microbatches hold the weights of two hot experts in three layers. Gradients of one layer are on their way, in
    # float32.
    layer, slots = 4096 * moe_layer(Plan(), moe).held(), (2 * 3 + 2) * 2 * 3 * 2048 * 1408 * 2
    # By step a rank holds them once in three layers, with gradients in float32. Gradients of two layers are on the way.
    by_step = (3 * 6 + 2 * 4) * 2 * 3 * 2048 * 1408
    held = 2 * (3 * layer + 300e6) + 3 * 1.2e9 + 0.2e9 + slots  # rank 0: one dense layer and three others, two of each
    assert 4 * layer + 4.8e9 + slots < held
    with pytest.raises(DiagnosticError) as caught:
        analyse(written(tmp_path, f"{BYTES} hot 2 by microbatch\n  memory {int(held / 1e6) - 1} MB"), {})
    (found,) = caught.value.diagnostics
    assert found.position == ("S406", 3, 3)
    assert found.message.startswith(f"rank 0 holds {shown(held, up=True)} at 0F1, and the plan allows ")
    activations, parameters = 2 * 3 * layer / 1e9, 3 * 1.2
    assert found.notes[0] == (
        f"most of it: parameters of MoE layers {parameters:.4g} GB, activations of MoE layers {activations:.4g} GB, "
        "activations of dense layers 600 MB"
    )
    assert "1f1b.sched:" in render(found)
    analyse(written(tmp_path, f"{BYTES} hot 2 by microbatch\n  memory {int(held / 1e6) + 1} MB"), {})
    enough = held - slots + by_step
    analyse(written(tmp_path, f"{BYTES} hot 2\n  memory {int(enough / 1e6) + 1} MB"), {})
    with pytest.raises(DiagnosticError, match=f"holds {re.escape(shown(enough, up=True))} "):
        analyse(written(tmp_path, f"{BYTES} hot 2\n  memory {int(enough / 1e6) - 1} MB"), {})
    less = held - 2 * 3 * 4096 * moe_layer(Plan(), moe).saving(Level.MEDIUM).bytes
    fits = f"{BYTES} hot 2 by microbatch\n  memory {int(less / 1e6) + 300} MB  recompute all medium"
    analyse(written(tmp_path, fits), {})
    with pytest.raises(DiagnosticError, match="S406"):
        analyse(written(tmp_path, fits.replace("medium", "light")), {})


@pytest.mark.parametrize(
    ("recompute", "row", "arrived"),
    [
        # Per token of a layer, held rows.
        ("medium adaptive(2.0) by group", 16 * 2 * (2048 + 3 * 1408), 0),
        ("full adaptive(3)", 24 * 2 * (2048 + 3 * 1408), 0),
        ("act adaptive(2) by group", 16 * 2 * (2048 + 3 * 1408), 0),
        # By rank, either 16 rows at what is held without recomputation, or all 8 rows of all tokens of 8 ranks at what
        # medium holds: rows as they arrived.
        ("medium adaptive(2.0)", 0, 64 * 2 * 2048),
    ],
)
def test_memory_counts_the_worst_case_of_adaptive(tmp_path: Path, recompute: str, row: int, arrived: int) -> None:
    """By hand: two microbatches with three MoE layers on rank 0, one with four on rank 1.

    The one that runs has all rows of eight ranks, 64 a token.
    """
    token = 2 * (8 * 2048 + 3 * 1408) + 4 * 64  # attention, shared experts, norms, scores: held in balanced steps
    beside = 36 * 64  # indexes and gates
    layer = 4096 * (token + row + arrived + beside)
    there = 4096 * (token + 2 * 64 * (2 * 2048 + 3 * 1408) + beside)
    running = [layers * there + 4096 * 64 * 2 * (4 * 2048 + 5 * 1408) for layers in (3, 4)]
    by_rank = [2 * (3 * layer + 300e6) + 3.8e9 + running[0], 4 * layer + 4.8e9 + running[1]]
    rank, held = max(enumerate(by_rank), key=lambda pair: pair[1])
    lines = f"{BYTES} recompute {recompute} "
    with pytest.raises(DiagnosticError) as caught:
        analyse(written(tmp_path, f"{lines} memory {int(held / 1e6) - 1} MB"), {})
    (found,) = caught.value.diagnostics
    assert found.message.startswith(f"rank {rank} holds ")
    assert f"the rows of the microbatch that runs {running[rank] / 1e9:.4g} GB" in found.notes[0]
    assert "give experts a `capacity`" in found.help
    analyse(written(tmp_path, f"{lines} memory {int(held / 1e6) + 2} MB"), {})
    analyse(written(tmp_path, f"{lines} capacity 1.25 memory 34 GB"), {})  # then no more than 10 rows a token come
    assert held > 34e9


def test_memory_and_adaptive_need_to_know_how_many_rows_may_come(tmp_path: Path) -> None:
    lines = f"{BYTES} recompute adaptive(2.0) memory 500 GB"
    analyse(written(tmp_path, lines), {})
    for gone in ("topology nodes 2 x 4", "width 1408 hidden 2048"):
        said = lines.replace(gone, "").replace("dense 300 MB", "dense 300 MB moe 3 GB")
        with pytest.raises(DiagnosticError, match="how many rows may come to a rank is not known") as caught:
            analyse(written(tmp_path, said), {})
        assert [found.code for found in caught.value.diagnostics] == ["S146"]


def test_what_waits_for_its_weights_has_been_worked_out_again(tmp_path: Path) -> None:
    """Between I and W nothing is saved by recomputation."""
    lines = f"{BYTES} memory 900 GB recompute"
    costs = [analyse(written(tmp_path, f"{lines} {x}", "zbh1(P = 2, M = 4)"), {}).costs for x in ("none", "full")]
    assert costs[1].pending_weight == costs[0].pending_weight
    moe = ExpertSizes(64, 8, 1, 1, 1, 1408, 2048)
    gradients = 8 * 2 * 2048  # of the outputs of a token's experts, which wait too
    assert costs[0].pending_weight[1] == pytest.approx(4 * 4096 * (moe_layer(Plan(), moe).held() + gradients))
    assert costs[1].activation < costs[0].activation


def test_what_fills_the_memory_is_counted_behind_recomputation(tmp_path: Path) -> None:
    """Recomputation leaves less of MoE layers, and all of the others; by hand, stage by stage."""
    lines = BYTES.replace("dense 1 ", "dense 3 ").replace("moe 1200 MB", "moe 12 MB")
    with pytest.raises(DiagnosticError) as caught:
        analyse(written(tmp_path, f"{lines} recompute medium\n  memory 1 MB"), {})
    moe = ExpertSizes(64, 8, 1, 1, 1, 1408, 2048)
    layer = 4096 * (moe_layer(Plan(), moe).held() - moe_layer(Plan(), moe).saving(Level.MEDIUM).bytes)
    (found,) = caught.value.diagnostics
    assert found.notes[0] == (
        f"most of it: activations of dense layers {shown(2 * 3 * 300e6)}, parameters of dense layers "
        f"{shown(3 * 200e6)}, activations of MoE layers {shown(2 * layer)}"
    )


def test_what_is_to_be_allowed_is_enough(tmp_path: Path) -> None:
    for unit, numbers in [(" MB", "moe 1234567 KB dense 7654321 KB"), ("", "moe 1.2345678 dense 7.654321")]:
        lines = f"layers 8 dense 1 experts 64 top 8 activations {numbers}\n  memory {{}}"
        with pytest.raises(DiagnosticError, match="S406") as caught:
            analyse(written(tmp_path, lines.format(f"1{unit}")), {})
        allowed = re.match(r"allow ([^,]+),", caught.value.diagnostics[0].help)
        assert allowed
        analyse(written(tmp_path, lines.format(allowed[1])), {})


def test_numbers_beyond_all_reason_are_refused_in_words(tmp_path: Path) -> None:
    most = 2**31 - 1
    lines = f"layers 4 experts 65536 top 65536 shared {most} width {most} hidden {most} tokens {most} hot auto"
    with pytest.raises(DiagnosticError, match="S406"):
        analyse(written(tmp_path, f"{lines} topology nodes 65536 x 1 recompute full memory 1 GB"), {})


def test_deferred_weight_gradients_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        analyse(written(tmp_path, "layers 8 memory 1", "zbh2(P = 4, M = 8)"), {})
    (found,) = caught.value.diagnostics
    known = analyse("zbh2", {"P": 4, "M": 8})
    assert f"holds {2 * known.memory.peak_memory.max():g} at" in found.message
    assert found.notes[0].startswith("most of it: activations of dense layers ")


def test_slots_of_hot_experts_at_the_sizes_of_deepseek_v3(tmp_path: Path) -> None:
    """Eight MoE layers on the fullest rank hold three experts each, in bf16, and their gradients in float32."""
    path = ROOT / "examples" / "dsv3_hot.sched"
    hot = report(analyse(path, {}))["plan"]["hot"]
    assert (hot["by"], hot["held_bytes"]) == ("step", 8 * 3 * 3 * 2048 * 7168 * (2 + 4))
    former = tmp_path / "former.sched"
    former.write_text(path.read_text().replace("hot 3 until", "hot 3 by microbatch until"))
    hot = report(analyse(former, {}))["plan"]["hot"]
    # Four layers of a stage hold them for each of 2P + 1 microbatches in flight.
    assert (hot["by"], hot["held_bytes"]) == ("microbatch", 4 * 17 * 3 * 3 * 2048 * 7168 * 2)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3"])
def test_parameters_of_moe_layers_are_those_of_the_model(name: str) -> None:
    """Where a plan says the heads of attention; tensor parallel ranks split all but experts."""
    model = open_model(name).at(4096)
    lines = f"{'  '.join(model_lines(model))}  topology nodes 1 x 2"
    plan = read_plan(lines, 1)
    own, experts = without_experts(layer_counts(model, model.layers - 1))
    assert layer_parameters(plan) == own + experts // 2
    if model.mtp:
        further = sum(layer_counts(model, model.layers).values())
        assert layer_parameters(plan, PartKind.MTP) == further - experts // 2
    split = read_plan(f"{lines}  parallel tp 4 of attention ep 2 dp 2", 1)
    assert layer_parameters(split) == ceil(own / 4) + experts // 2
    assert expert_share(split, PartKind.MOE) == (experts // 2) / (ceil(own / 4) + experts // 2)
    assert layer_parameters(replace(plan, block=None)) == expert_parameters(plan)
    wide = read_plan(f"{lines}  parallel tp 16 of attention ep 2 dp 8", 1)
    copies = 0 if model.attention.kv_lora else (16 - 8) * (128 + 128) * 4096
    assert layer_parameters(wide) == ceil((own + copies) / 16) + experts // 2, "each rank has a head of keys"


def test_attention_counts_in_memory_where_its_heads_are_known(tmp_path: Path) -> None:
    """Two norms, and products of heads with equal keys: 4 H H."""
    lines = BYTES.replace("moe 1200 MB ", "")
    plain, known = (
        report(analyse(written(tmp_path, f"{lines} {block} memory 99 GB"), {})) for block in ("", "block heads 16")
    )
    more = 4 * 2048 * 2048 + 2 * 2048
    parameters, without = known["plan"]["parameters"], plain["plan"]["parameters"]
    assert parameters["moe_layer"] - without["moe_layer"] == more
    assert parameters["unknown"] == without["unknown"][1:]
    held = max(known["peak_memory"]) - max(plain["peak_memory"])
    assert held == pytest.approx(4 * 2 * more, rel=1e-9) or held == pytest.approx(3 * 2 * more, rel=1e-9)
    assert "it has" in to_text(known, False)


def test_parameters_of_moe_layers_follow_from_the_sizes(tmp_path: Path) -> None:
    """By hand: a rank of eight holds 8 of 64 experts, one shared expert and the router of each layer, in bf16."""
    count = 3 * 2048 * 1408 * (64 // 8 + 1) + 2048 * 64
    lines = BYTES.replace("moe 1200 MB ", "")
    layer = 4096 * moe_layer(Plan(), ExpertSizes(64, 8, 1, 1, 1, 1408, 2048)).held()
    held = 4 * layer + 4 * count * 2  # rank 1 has four layers, and one microbatch
    first = 2 * (3 * layer + 300e6) + 3 * count * 2 + 0.2e9
    rank, most = max(enumerate((first, held)), key=lambda pair: pair[1])
    with pytest.raises(DiagnosticError, match=f"rank {rank} holds {re.escape(shown(most, up=True))} "):
        analyse(written(tmp_path, f"{lines} memory {int(most / 1e6) - 1} MB"), {})
    facts = report(analyse(written(tmp_path, f"{lines} memory {int(most / 1e6) + 1} MB"), {}))
    unknown = ["attention", "the embedding", "the head"]
    known = {"moe_layer": count, "moe_layer_bytes": 2 * count, "states": 0, "unknown": unknown}
    assert facts["plan"]["parameters"] == known
    stated = analyse(written(tmp_path, f"{lines} states 5.5 memory {int((most + 4 * count * 5.5) / 1e6) + 1} MB"), {})
    assert "MB with their states" in to_text(report(stated), False)
    with pytest.raises(DiagnosticError, match=r"rank \d holds "):
        analyse(written(tmp_path, f"{lines} states 5.5 memory {int((held + 4 * count * 5.5) / 1e6) - 1} MB"), {})
    text = to_text(facts, False)
    assert "experts and router have 77,987,840 parameters on a rank, 156 MB of weights alone" in text
    assert "parameters of attention, the embedding and the head are not known: counted as 0" in text
    elsewhere = report(analyse(written(tmp_path, f"{lines.replace('topology nodes 2 x 4', '')} memory 90 GB"), {}))
    unknown = ["MoE layers", "the embedding", "the head"]
    assert elsewhere["plan"]["parameters"] == {
        "moe_layer": None, "moe_layer_bytes": None, "states": 0, "unknown": unknown,
    }  # fmt: skip
    given = lines.replace("dense 200 MB", "dense 200 MB moe 1 GB embedding 0 MB head 1 GB")
    assert report(analyse(written(tmp_path, f"{given} memory 90 GB"), {}))["plan"]["parameters"]["unknown"] == []
    assert "parameters" not in report(analyse(written(tmp_path, lines), {}))["plan"]


def test_memory_inside_cells_is_told_beside_the_peak(tmp_path: Path) -> None:
    """By hand, for layers that hold 8 H and 3 F; rank 0 of 1F1B holds two microbatches."""
    sizes = "layers 4 block hidden 64 heads 4 inner 128 tokens 256 dtype fp32 parameters dense 0 MB"
    numbers = {"none": 8 * 64 + 3 * 128, "act": 6 * 64 + 2 * 128, "layer": 64}
    for level, held in numbers.items():
        recompute = "" if level == "none" else f" recompute {level}"
        facts = report(analyse(written(tmp_path, f"{sizes}{recompute} memory 4 MB"), {}))
        stage = 2 * held * 256 * 4
        assert facts["peak_memory"] == pytest.approx([2 * stage, stage], rel=1e-12)
        runs = 4 * 64 + max(4 * 64, 5 * 128)
        one = 256 * 4 * (runs + numbers["none"] - held)
        assert facts["inside_memory"] == pytest.approx([2 * stage + one, stage + one], rel=1e-12)
        told = [line for line in to_text(facts, False).splitlines() if line.startswith("memory: a rank")]
        over = f" ({shown(2 * stage + one - 4e6, up=True)} beyond it)" if level == "none" else ""
        assert told == [
            f"memory: a rank holds at most {shown(2 * stage, up=True)} between ops, of the plan's {shown(4e6)};"
            f" inside a cell {shown(2 * stage + one, up=True)}{over}, by an estimate from above"
        ]


def test_states_that_do_not_count_are_told(tmp_path: Path) -> None:
    sizes = "layers 4 experts 8 top 2 width 64 hidden 64 tokens 256 topology nodes 1 x 2 memory 9 GB states 16"
    told = {}
    for parameters in ("", " parameters moe 1 MB"):
        facts = report(analyse(written(tmp_path, sizes + parameters), {}))
        told[parameters] = "states 16 does not count in `memory`" in to_text(facts, False)
    assert told == {"": False, " parameters moe 1 MB": True}


def test_memory_inside_cells_needs_the_sizes_of_all_layers(tmp_path: Path) -> None:
    facts = report(analyse(written(tmp_path, f"{BYTES} memory 80 GB"), {}))
    assert "inside_memory" not in facts
    sized = BYTES.replace(" activations dense 300 MB", " block heads 16 inner 4096")
    plain, adaptive = (
        report(analyse(written(tmp_path, f"{sized} memory 800 GB{more}"), {}))
        for more in ("", " recompute full adaptive(2.0)")
    )
    assert min(inside - peak for inside, peak in zip(plain["inside_memory"], plain["peak_memory"], strict=True)) > 0
    assert adaptive["inside_memory"][1] == adaptive["peak_memory"][1]  # the worst routing has it already


@pytest.mark.parametrize(
    ("split", "exchanged", "gathered"),
    [
        ("tp 2", {"message": 1024, "gather": 1024, "scatter": 1024}, 2048.0),
        ("tp 4 cp 2", {"message": 1024, "gather": 3072, "scatter": 3072, "keys": 1024}, 7168.0),
        ("cp 2", {"message": 1024, "keys": 1024}, 1024.0),
    ],
)
def test_what_ranks_gather_stands_beside_the_memory(
    tmp_path: Path, split: str, exchanged: dict[str, int], gathered: float
) -> None:
    """8 tokens of 32 columns in 4 bytes, 2 layers in the first stage: t inputs of a core in place of one, two cores."""
    facts = checked(tmp_path, split, "")
    assert facts["exchanged"] == exchanged
    assert facts["gathered"] == [2 * gathered, gathered]
    assert facts["gathered_peak"] == 2 * 2 * gathered
    again = checked(tmp_path, split, "recompute layer", "zbh1")
    assert again["gathered"] == [2048.0, 1024.0], "own rows before an MLP"
    assert again["gathered_peak"] >= 2 * gathered, "one microbatch of the first stage waits for its W"
    assert "gathered" not in checked(tmp_path, "dp 2", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "more", "schedule"),
    [
        ("tp 2", "", "1f1b"),
        ("tp 4 cp 2", "", "zbh1"),
        ("cp 2", "", "1f1b"),
        ("tp 2", "recompute layer", "zbh1"),
        ("tp 2", "recompute layer in bubbles", "zbh1"),
    ],
)
def test_a_memory_that_gathered_rows_exceed_is_warned_of(tmp_path: Path, split: str, more: str, schedule: str) -> None:
    """The figure is what `gathered` and the memory say together. A memory just below the figure is warned of."""
    large = checked(tmp_path, split, more, schedule)
    step = analyse(tmp_path / "split.sched", {})
    assert step.bytes is not None
    kept = kept_gathered(step.plan, step.layout)
    assert kept is not None
    gathered = most_held(step.schedule, *kept)
    assert large["gathered_peak"] == gathered.max()
    whole = with_gathered(step.held, kept).peaks()
    assert step.bytes.peak.max() < whole.max() <= (step.bytes.peak + gathered).max()
    held, waiting = (tuple(row.tolist()) for row in kept)
    alone = Costs(F=0.0, activation=held, pending_weight=waiting, recomputed=held, restored=waiting)
    after = running_memory(step.schedule, alone.resolved(2), np.zeros(2)) + step.held.after
    assert whole == pytest.approx(
        step.held.standing + [part.max() for part in np.split(after, step.schedule.rank_start[1:-1])]
    )
    warnings = {}
    for name, limit in (("below", whole.max() - 1), ("at", whole.max() + 1)):
        checked(tmp_path, split, more, schedule, f"{limit / 1e6:.6f} MB")
        facts = report(analyse(tmp_path / "split.sched", {}))["plan"]
        warnings[name] = [each["message"] for each in facts["warnings"] if each["code"] == "S414"]
    rank = int(np.argmax(whole))
    assert warnings["at"] == []
    (warning,) = warnings["below"]
    assert warning.startswith(f"rank {rank} holds {shown(whole[rank], up=True)} at {rank}")


def checked(folder: Path, split: str, more: str, schedule: str = "1f1b", memory: str = "1 GB") -> dict[str, Any]:
    """What `schedc check` says of the line ``parallel``."""
    path = folder / "split.sched"
    lines = f'layout "Ett|tL"  block hidden 32 heads 4 head 8 keys 2 inner 64  tokens 8 dtype fp32  parallel {split}'
    path.write_text(f"sched 1\nplan p = {schedule}(P = 2, M = 4) {{ {lines}  {more}  memory {memory} }}\n")
    result = CliRunner().invoke(main, ["check", str(path), "--json"])
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = json.loads(result.stdout)["plan"]["parallel"]
    return facts


@pytest.mark.parametrize(
    ("value", "text"), [(4.9152e-05, "0.000049152"), (1e-30, f"0.{'0' * 29}1"), (1.5e17, "15" + "0" * 16)]
)
def test_numbers_have_the_fewest_digits_that_give_them_back(value: float, text: str) -> None:
    assert digits(value) == text
    assert float(text) == value
