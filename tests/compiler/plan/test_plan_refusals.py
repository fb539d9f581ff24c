"""What is wrong in the lines of a plan: each finding at its place, with how the line is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedc.compiler import analyse
from schedc.diagnostics import DiagnosticError
from schedc.editor.findings import findings
from schedc.source import Source
from support.plan_cases import MOE, written


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("layers 4  experts 64", [("S145", 2, 13)]),
        ("layers 4  experts 64 top 65", [("S145", 2, 13)]),
        ("layers 4  experts 64 top 9 groups 8 limit 1", [("S145", 2, 13)]),
        ("layers 4  experts 64 top 2 groups 7", [("S145", 2, 13)]),
        ("layers 4  experts 64 top 2 limit 7", [("S145", 2, 13)]),
        ("layers 4  experts 64 top 2 widht 7", [("S144", 2, 30)]),
        ("layers 4  experts 60 top 8\n  topology nodes 2 x 4", [("S145", 3, 3)]),
        ("layers 4  topology nods 2 by 4", [("S144", 2, 22), ("S144", 2, 29)]),
        ("layers 4  topology nodes 2 x 0", [("S146", 2, 13)]),
        ("layers 4  topology nodes 2 x 4 rail 50 node 4 GB", [("S146", 2, 34), ("S146", 2, 42)]),
        ("layers 4  tokens 0  alltoall flt  overlap yes", [("S146", 2, 13), ("S144", 2, 32), ("S144", 2, 45)]),
        ("layers 4  tokens 8 dtype int8", [("S144", 2, 28)]),
        ("layers 4  hot auto  hot 2", [("S144", 2, 23)]),
        (f"{MOE}\n  hot 9", [("S151", 3, 3)]),
        (f"{MOE}\n  hot 0", [("S151", 3, 3)]),
        (f"{MOE}\n  hot 2 until fullness > 1.2", [("S144", 3, 15)]),
        (f"{MOE}\n  hot 2 until imbalance < 0.5", [("S146", 3, 3)]),
        (f"{MOE}\n  hot 2 by step", [("S144", 3, 12)]),
        (f"{MOE}\n  hot auto by microbatch until imbalance < 1.5", None),
        (f"{MOE}\n  tokens 8  capacity 0.5 drop probs", [("S152", 3, 13)]),
        (f"{MOE}\n  capacity 0", [("S152", 3, 3)]),
        (f"{MOE}\n  capacity 1 drop prob", [("S144", 3, 19)]),
        (f"{MOE}\n  products cutlass", [("S144", 3, 12)]),
        (f"{MOE}\n  products grouped or else_", [("S144", 3, 23)]),
        (f"{MOE}\n  products bmm", [("S144", 3, 3)]),
        (f"{MOE}\n  products padded\n  sizes bounded 1.25", [("S144", 3, 3)]),
        (f"{MOE}\n  products tiles\n  sizes bounded 1.25", [("S144", 3, 3)]),
        (f"{MOE}\n  balance over group", [("S144", 3, 3)]),
        (f"{MOE}\n  balance by over", [("S144", 3, 14)]),
        (f"{MOE}\n  balance by microbatch over", [("S144", 3, 25)]),
        (f"{MOE}\n  balance by microbatch over group within 0.9", [("S158", 3, 3)]),
        (f"{MOE}\n  balance by step", None),
        (f"{MOE}\n  balance by microbatch over node", None),
        (f"{MOE}\n  balance by step over group within 1.2", [("S158", 3, 3)]),
        (f"{MOE}\n  balance by step over group slots 0", [("S158", 3, 3)]),
        (f"{MOE}\n  balance by step over group slots 999", [("S158", 3, 3)]),
        (f"{MOE}\n  balance by step over group slots 2", None),
        (f"{MOE}\n  balance auto over group", None),
        (f"{MOE}\n  balance auto over group in place", [("S158", 3, 3)]),
        (f"{MOE}\n  balance by microbatch over group slots 2", None),
        (f"{MOE}\n  balance by microbatch over group\n  alltoall hierarchical", [("S158", 3, 3)]),
        (f"{MOE}\n  balance by step\n  alltoall hierarchical", None),
        (f"{MOE}\n  balance by microbatch over group\n  capacity 1.25", [("S158", 3, 3)]),
        (f"{MOE}\n  balance by microbatch over group\n  sizes bounded 1.25", [("S158", 3, 3)]),
        (f"{MOE.replace('2 x 4', '8 x 1')}\n  balance by microbatch", [("S158", 3, 3)]),
        (f"{MOE}\n  balance by step\n  sizes bounded 1.25", None),
        (f"{MOE}\n  balance by step\n  sizes bounded 1.25\n  alltoall hierarchical", None),
        (f"{MOE}\n  balance by microbatch over group\n  hot 2", [("S158", 3, 3)]),
        (f"{MOE}\n  migrate every 0 steps", [("S158", 3, 3)]),
        (f"{MOE}\n  migrate each 5 steps", [("S144", 3, 11)]),
        (f"{MOE}\n  migrate every 5 steps when wins > 1 %", [("S144", 3, 30)]),
        (f"{MOE}\n  migrate every 5 steps when gain < 1 %", [("S144", 3, 35)]),
        (f"{MOE}\n  migrate every 5 steps\n  capacity 1.25", [("S158", 3, 3)]),
        (f"{MOE}\n  balance by microbatch over group\n  slices 2", [("S153", 4, 3)]),
        ("layers 4  experts 8 top 2 precision int4", [("S144", 2, 39)]),
        ("layers 4  experts 8 top 2 exactness fp8", [("S144", 2, 29)]),
        ("layers 4  experts 8 top 2 precision fp8 or else_", [("S144", 2, 46)]),
        ("layers 4  experts 8 top 2 precision 8", [("S144", 2, 29)]),
        ("layers 4  experts 8 top 2 precision fp8\n  products grouped", [("S144", 3, 3)]),
        ("layers 4  experts 8 top 2 precision fp8 or fallback\n  products scaled_grouped or fallback", None),
        (f"{MOE}\n  sizes padded", [("S144", 3, 9)]),
        (f"{MOE}\n  rows int8", [("S144", 3, 8)]),
        ("layers 4  shard dens", [("S144", 2, 19)]),
        ("layers 4  shard dense  shard dense", [("S144", 2, 26)]),
        (f"{MOE}\n  states 16 each much", [("S144", 3, 13)]),
        (f"{MOE}\n  sizes bounded", [("S144", 3, 3)]),
        (f"{MOE}\n  sizes exact 2", [("S144", 3, 3)]),
        (f"{MOE}\n  sizes bounded 0.9", [("S152", 3, 3)]),
        (f"{MOE}\n  sizes bounded 2  capacity 2", [("S144", 3, 3)]),
        (f"{MOE}\n  sizes bounded 2  hot auto", [("S144", 3, 3)]),
        (f"{MOE}\n  sizes exact  capacity 2", None),
        (f"{MOE}\n  recompute all full adaptive(2.0) by rank", [("S150", 3, 3)]),
        (f"{MOE}\n  recompute all full adaptive(0.5)", [("S149", 3, 3)]),
        (f"{MOE}\n  recompute norm adaptive(2.0)", None),
        (f"{MOE}\n  recompute lite", [("S144", 3, 13)]),
        (f"{MOE}\n  recompute lair 3 light", [("S144", 3, 13)]),
        (f"{MOE}\n  recompute layer 3 light", [("S149", 3, 21)]),
        (f"{MOE}\n  recompute chunk 0", [("S149", 3, 3)]),
        (f"{MOE}\n  recompute in bubbles", [("S149", 3, 3)]),
        (f"{MOE}\n  recompute none in bubbles", [("S149", 3, 3)]),
        (f"{MOE}\n  recompute full adaptive(2.0) in bubbles", [("S149", 3, 3)]),
        (f"{MOE}\n  recompute full in pockets", [("S144", 3, 21)]),
        (f"{MOE}\n  recompute chunk 1 light\n  recompute stage [0, 2] light", [("S149", 3, 3), ("S149", 4, 3)]),
        (f"{MOE}\n  recompute light\n  recompute all full", [("S149", 4, 3)]),
        ("layers 4  cell B & F auto", [("S147", 2, 22)]),
        ("layers 4  cell F & B { compute F.atn F.experts.I comm F.dispatch F.dispatch }",
         [("S147", 2, 34), ("S147", 2, 40), ("S147", 2, 68)]),
        ("layers 4  cell F & B { comput F.attn }", [("S144", 2, 26)]),
        ("layers 4  overlap off  cell F & B { compute F.attn }", [("S144", 2, 13)]),
        ("layers 4  cell F & B auto  overlap off", [("S144", 2, 30)]),
        ("layers 4  cell F & B auto  cell F & B { compute F.attn }", [("S147", 2, 30)]),
        ("layers 4  cell F & B { compute F.attn }\n  cell F & I { compute F.attn }", [("S147", 3, 3)]),
        ("layers 4 dense 4  experts 8 top 2", [("S145", 2, 21)]),
        ("layers 4  experts 8 top 2 top 3  hot 9", [("S144", 2, 29), ("S151", 2, 36)]),
        ("layers 4  experts 8 top 2\n  topology nodes 16 x 1  hot 1", [("S145", 3, 3)]),
        ("layers 4  cell F & B { compute F.experts F.attention B.experts B.attention }", None),
        ("layers 4\n  cell F & B { compute F.attention F.experts comm F.routing F.combine F.dispatch }",
         [("S323", 3, 3)]),
        (f"{MOE}\n  parallel tp 2 of attention cp 2 ep 8 dp 4 zero 1 devices 32 node 4", None),
        (f"{MOE}\n  parallel ep 8 dp 12", [("S156", 3, 3)]),
        (f"{MOE}\n  parallel tp 2 ep 8 dp 4", [("S156", 3, 3)]),
        (f"{MOE}\n  parallel ep 4 dp 4", [("S156", 3, 3)]),
        (f"{MOE}\n  parallel ep 8 dp 8 node 8", [("S156", 3, 3)]),
        (f"{MOE}\n  parallel ep 8 dp 8 node 6", [("S156", 3, 3)]),
        (f"{MOE}\n  parallel ep 8 dp 8 devices 12", [("S156", 3, 3)]),
        (f"{MOE}\n  parallel ep 8 dp 8 devices 24", [("S156", 3, 3)]),
        (f"{MOE}\n  parallel ep 8 dp 8 devices 16 node 32", [("S156", 3, 3)]),
        ("layers 4  experts 64 top 8\n  parallel ep 48 dp 48", [("S156", 3, 3)]),
        ("layers 4  parallel ep 2 dp 2", [("S156", 2, 13)]),
        ("layers 4  block hidden 64 heads 4  parallel tp 8", [("S156", 2, 38)]),
        ("layers 4  parallel dp 2 of attention", [("S156", 2, 27)]),
        ("layers 4  parallel tp 2 of experts", [("S144", 2, 30)]),
        ("layers 4  parallel tp 2 tp 2", [("S144", 2, 27)]),
        ("layers 4  parallel pp 2", [("S144", 2, 22)]),
        ("layers 4  block hidden 64 inner 256  attention 25 KB", None),
        ("layers 4  block hidden 64 inner 256  attention 25", [("S146", 2, 40)]),
        ("layers 4  attention 25 KB", [("S146", 2, 13)]),
        ("layers 4  shard dense  parallel dp 2 zero 1", [("S156", 2, 26)]),
        ("layers 4  parallel dp 0", [("S156", 2, 22)]),
        ("layers 4  parallel zero 4", [("S156", 2, 22)]),
        ("layers 4  parallel dp 4\n  batch 24 x 128", [("S157", 3, 3)]),
        ("layers 4  parallel dp 4  batch 32 x 128 by 2  tokens 256", None),
        ("layers 4  parallel tp 2 dp 4  batch 32 x 128 by 2\n  tokens 256", [("S157", 2, 33)]),
        ("layers 4  parallel cp 2  batch 4 x 129", [("S157", 2, 28)]),
        ("layers 4  batch 6 x 128", [("S157", 2, 13)]),
        ("layers 4  batch 12 x 128 by 3", None),
        ("layers 4  batch 0 x 128", [("S157", 2, 13)]),
        ("layers 4  batch 4 by 128 of 1", [("S144", 2, 21), ("S144", 2, 28)]),
        ("layers 4  block hidden 64 inner 256 sequence 64  batch 4 x 128", [("S157", 2, 52)]),
        ("layers 4  memory 4 GB", [("S146", 2, 13)]),
        ("layers 4  memory 4  activations dense 3 GB", [("S146", 2, 35)]),
        ("layers 4  memory 4 Gbit", [("S146", 2, 13)]),
        ("layers 4  costs dense 3 GB", [("S146", 2, 19)]),
    ],
)  # fmt: skip
def test_what_is_wrong_and_where(tmp_path: Path, lines: str, expected: list[tuple[str, int, int]] | None) -> None:
    path = written(tmp_path, lines, *["dualpipev(P = 2, M = 8)"] * ("cell " in lines))
    if expected is None:
        analyse(path, {})
        return
    with pytest.raises(DiagnosticError) as caught:
        analyse(path, {})
    assert [d.position for d in caught.value.diagnostics] == expected
    assert all(d.help for d in caught.value.diagnostics)
    assert [d.position for d in findings(Source("x", Path(path).read_text()))] == expected


@pytest.mark.parametrize(
    ("lines", "expected", "says"),
    [
        ("tokens", ("S001", 3, 3), "write it as `tokens 4096 dtype bf16`"),
        ("capacity 1.25 drop\n  tokens 8", ("S001", 3, 17), "write it as `capacity 1.25 drop probs`"),
        ("topology nodes 4 x\n    rail 8", ("S001", 3, 20), "write it as `topology nodes 4 x 8"),
        ("overlap on", ("S001", 3, 11), "write it as `overlap auto`"),
        ("topology nodes 4x8", ("S006", 3, 18), "write `4 x 8`"),
        ("topology nodes 4 × 8", ("S002", 3, 20), "x between the numbers"),
        ("topology nodes 4 x 8 rail 50 gb/s", ("S001", 3, 34), "did you mean `GB`?"),
        ("topology nodes 4 x 8 rail 50 GB*s", ("S146", 3, 24), "50 GB/s"),
        ("memory 80GB", ("S006", 3, 10), "write `80 GB`"),
        ("memory 80 gb", ("S001", 3, 13), "did you mean `GB`?"),
        ("frobnicate 7\n  tokens", ("S144", 3, 3), "a plan says layers, layout"),
        ("tokens 8\n  overlp auto", ("S144", 4, 3), "did you mean `overlap`?"),
        ("experts 8\n    widht 3 top 2", ("S144", 4, 5), "did you mean `width`?"),
        ("cell F & W auto", ("S147", 3, 12), "a W in a pair fills gaps"),
        ("cell F & B { }", ("S147", 3, 3), "`cell F & B auto`"),
        ("cell F & B { compute comm F.dispatch }", ("S147", 3, 3), "name steps"),
        ("cell F & B { compute W.attn B.attn.I.W F.dispatch }", ("S147", 3, 24), "F.role, B.role.I"),
    ],
)
def test_slips_are_told_in_their_line_and_how_it_is_written(
    tmp_path: Path, lines: str, expected: tuple[str, int, int], says: str
) -> None:
    with pytest.raises(DiagnosticError) as caught:
        analyse(written(tmp_path, f"layers 4\n  {lines}", "dualpipev(P = 2, M = 8)"), {})
    first = caught.value.diagnostics[0]
    assert (first.position, says in first.help) == (expected, True)
