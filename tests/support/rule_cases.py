"""Steps under the rules of a device, each with the rules that it must meet. They keep the bits of a CPU.

Two kinds of bits are not those of a CPU, and are held otherwise. What a device rounds or adds in an order of its own
(`embedding`, `narrow`) is compared with the serial reference under the same rules. Sums of a chunked loss in 16 bits
(`decomposed`) take rounded factors on a device: the head's weight is compared by tolerance, all else by bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import schedc
from schedc_runtime import ChunkedLoss, Cut, Pipeline
from schedc_runtime.device.rules import EVERY
from schedc_runtime.testing import simulated_device
from support.runtime_cases import differences, gradients, next_token_loss, oracle, small_gpt, tokens
from support.simulated_cases import EXPERTS, expert_steps, snapshot_steps

Values = Mapping[str, Tensor]


def experts(lines: str, schedule: str = "1f1b", ranks: int = 1, dtype: torch.dtype = torch.float64) -> Values:
    """A step with experts, of one microbatch with 1F1B and two with others."""
    return expert_steps(schedule, {"P": ranks, "M": 1 if schedule == "1f1b" else 2}, lines, dtype=dtype)


def hot_steps() -> Values:
    """Two steps of a model whose routers prefer some experts, which are lent in the second."""
    from runtime.moe.hot_cases import gradients as gradients_of
    from runtime.moe.hot_cases import lent, pipeline, skewed, step

    lines = f"{EXPERTS}  alltoall hierarchical\n  hot 2 until imbalance < 1.1\n"
    pipe = pipeline("zbh1", {"P": 1, "M": 1}, lines, skewed(2.0))
    losses = {f"loss {seed}": step(pipe, seed) for seed in (1, 2)}
    assert lent(pipe)["hot_rows"] > 0
    return losses | gradients_of(pipe)


def chunked(form: str, dtype: torch.dtype = torch.float64) -> Values:
    """Loss and gradients of a model without experts whose loss is in chunks. Few words, many times each."""
    loss_fn = ChunkedLoss("head", chunk=5, form=form)
    program = schedc.compile("zbh1", P=2, M=2)
    pipe = Pipeline(small_gpt().to(dtype), program, loss_fn=loss_fn, in_process=True, cut=Cut(segmented=True))
    loss = pipe.step(*(part % 5 for part in tokens(4)))
    return {"loss": loss} | gradients(pipe)


class RuleCase(NamedTuple):
    """A run whose bits stay under all rules. met: rules that must concern a call. loose: what is compared roughly."""

    name: str
    run: Callable[[], Values]
    met: frozenset[str]
    loose: tuple[str, ...] = ()


ROUTED = frozenset({"fresh", "bags", "duplicates", "ties", "ranges", "whole"})
"""What every step with experts meets."""
ROUGH = ("head.weight",)
"""What sums in 16 bits give by tolerance, see above."""
NOT_A_CPU = ("embedding", "narrow")
"""Rules whose bits are those of a device: `serial` holds them."""
SAME = (
    *(RuleCase(f"exact, {way}", partial(experts, f"  alltoall {way}\n"), ROUTED | {"pinned"})
      for way in ("flat", "hierarchical", "allgather")),
    RuleCase("grouped products", partial(experts, "  alltoall flat\n", dtype=torch.float32),
             ROUTED | {"operands", "unwritten"}),
    RuleCase("capacity", partial(experts, "  alltoall flat\n  capacity 1.25 drop probs\n"), ROUTED),
    RuleCase("capacity, hierarchical", partial(experts, "  alltoall hierarchical\n  capacity 1.0\n"), ROUTED),
    RuleCase("bounded", partial(experts, "  alltoall hierarchical\n  sizes bounded 4\n", dtype=torch.float32),
             ROUTED | {"operands", "unwritten"}),
    RuleCase("zbh1", partial(experts, "  alltoall flat\n", "zbh1", 2), ROUTED),
    RuleCase("pairs", partial(experts, "  alltoall flat\n  overlap auto\n", "dualpipev"), ROUTED),
    RuleCase("hot experts", hot_steps, ROUTED | {"sums"}),
    RuleCase("chunked loss, early", partial(chunked, "early"), frozenset({"fresh", "ranges", "sums"})),
    RuleCase("chunked loss, again", partial(chunked, "again"), frozenset({"fresh", "ranges", "sums"})),
    RuleCase("chunked loss in 16 bits", partial(chunked, "early", torch.bfloat16),
             frozenset({"fresh", "decomposed"}), ROUGH),
    RuleCase("offload and snapshots", partial(snapshot_steps, "1f1b"), frozenset({"fresh", "pinned"})),
)  # fmt: skip


def under(run: Callable[[], Values], rules: str | Sequence[str] = EVERY) -> tuple[Values, Counter[str]]:
    """What a run gives under rules, and how many calls met each."""
    with simulated_device(rules=rules) as seen:
        values = run()
    return values, Counter(seen.met)


def unlike(values: Values, expected: Values, loose: tuple[str, ...] = ()) -> list[str]:
    """Names of what differs. loose: names of what may differ by the rounding of its factors."""
    wrong = sorted(values.keys() ^ expected.keys())
    for name in values.keys() & expected.keys():
        value, other = values[name].float(), expected[name].float()
        close = name in loose and (value - other).norm() <= 2**-7 * other.norm()
        wrong += [] if close or torch.equal(values[name], expected[name]) else [name]
    return wrong


def changed(case: RuleCase) -> tuple[list[str], Counter[str]]:
    """What is wrong with a case: values that differ, rules without a call. And the calls that met each rule."""
    expected = case.run()
    values, met = under(case.run)
    wrong = [f"{case.name}: {name} has other bits" for name in unlike(values, expected, case.loose)]
    return wrong + [f"{case.name}: nothing met {rule}" for rule in sorted(case.met) if not met[rule]], met


def gradients_of(schedule: str, dtype: torch.dtype = torch.float64, compared: bool = False) -> Values:
    """Gradients of a step of two microbatches without experts. Few words, many times each.

    compared: give what differs from the serial reference instead.
    """
    program = schedc.compile(schedule, P=2, M=2)
    batch, targets = (part % 5 for part in tokens(4))
    pipe = Pipeline(small_gpt().to(dtype), program, loss_fn=next_token_loss, in_process=True, example=batch)
    loss = pipe.step(batch, targets)
    if not compared:
        return gradients(pipe)
    return dict.fromkeys(differences(pipe, loss, oracle(pipe, batch, targets)), loss)
