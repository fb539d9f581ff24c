"""Cases of the loss by vocabulary on real ranks, against plain autograd over whole logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import schedc
from schedc.ir.plan import HeadLoss
from schedc.plan import Plan
from schedc_runtime import ChunkedLoss, Mesh, Pipeline
from schedc_runtime.errors import RuntimeFault
from support.cell_orders import digest, in_each_order
from support.gradient_errors import error_of
from support.tensor_cases import SCHEDULES, TOY_PLAN, batch, family, toy, wide_norms
from support.wide_models import WideModel, on_rank_0, steady
from support.wide_numbers import narrow


class Logits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """rows, columns: the most rows and columns of a result [rows, columns] with one of the ``widths`` of logits."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.widths, self.rows, self.columns = widths, 0, 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.t.default:  # of the head's weight
            return result
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] in self.widths:
                self.rows, self.columns = max(self.rows, tensor.shape[0]), max(self.columns, tensor.shape[1])
        return result


CHUNK = 5
"""Rows of logits at a time, of the 16 rows of a microbatch."""


def labels() -> Tensor:
    """[rows, S] labels, of which microbatches ignore different numbers, the second one all."""
    given = batch()[1].clone()
    given[0, 3:] = given[2:4] = given[7, 0] = -100
    given[5, 0], given[5, 1] = 0, 63
    return given


@on_rank_0
def reference(model: nn.Module, logits_of: Any, wide: bool = True) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss, gradients [...] and logits [rows, S, V] of one process with plain autograd. wide: in long doubles."""
    whole = WideModel(model, wide)
    logits = logits_of(whole(input_ids=batch()[0]))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels().flatten())
    loss.backward()
    return narrow(loss).item(), whole.gradients(), narrow(logits)


def _case(
    model: nn.Module, head: str, schedule: str, form: str, styles: dict[str, str] | None, expected: Any,
    evaluated: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Errors against the figures ``expected`` in each order, and the largest logits of a step in the first one."""
    program = schedc.compile(schedule, P=2, **SCHEDULES.get(schedule, {"M": 4}))
    errors, bits = [], set[str]()
    tokens = batch()[0]
    columns = model.get_submodule(head).weight.shape[0]  # type: ignore[union-attr]
    pipe = Pipeline(
        model, program, loss_fn=ChunkedLoss(head), mesh=Mesh(2, tensor=2), tensor_plan=styles,
        plan=Plan(loss=HeadLoss(form, CHUNK)), example={"input_ids": tokens[:2]}, timeout=60.0,
    )  # fmt: skip
    made = Logits([columns // 2, columns])
    for order in in_each_order(pipe):
        with made if order == "serial" else nullcontext():
            loss = pipe.step({"input_ids": tokens}, labels()).item()
        errors += [error_of(pipe, expected[1]), abs(loss - expected[0]) / expected[0]]
        bits.add(digest(pipe))
        if evaluated and order == "serial":  # the order of a cell is no matter of an evaluation, which is recorded anew
            result = pipe.evaluate({"input_ids": tokens}, labels(), outputs=True)
            assert result.loss.item() == loss or abs(result.loss.item() - loss) < 1e-15 * loss
            if result.outputs is not None:
                logits = result.outputs if isinstance(result.outputs, Tensor) else result.outputs["logits"]
                own = torch.stack([expected[2].unflatten(0, (4, -1))[m] for m in result.microbatches]).flatten(0, 1)
                errors.append(((logits - own).abs().max() / own.abs().max()).item())
    pipe.close()
    return {"error": max(errors), "equal": len(bits) == 1, "logits": [made.rows, made.columns]}


WHOLE = {name: style for name, style in TOY_PLAN.items() if name not in ("embedding", "head")} | {"head": "replicate"}


def toys(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    """Toys with split and whole heads, tied and not, in both forms: those of ``names``; and a refusal."""
    figures: dict[str, Any] = {}
    for tied, schedule, form, styles in (
        (False, "zbh1", "again", TOY_PLAN), (True, "1f1b", "early", TOY_PLAN), (True, "dualpipev", "again", TOY_PLAN),
        (False, "dualpipe", "early", TOY_PLAN), (True, "zbh1", "early", WHOLE),
    ):  # fmt: skip
        name = f"{schedule}{' tied' * tied} {form}{' whole' * (styles is WHOLE)}"
        if name not in names:
            continue
        model = toy(tied=tied, blocks=4 if schedule == "dualpipev" else 2)
        figures[name] = _case(model, "head", schedule, form, styles, reference(model, lambda given: given))
    return figures | {"refused": _refused()}


def _refused() -> str:
    """What a pipeline says of a loss whose chunks differ between ranks."""
    mesh, program = Mesh(2, tensor=2), schedc.compile("1f1b", P=2, M=4)
    loss_fn = ChunkedLoss("head", chunk=4 + torch.distributed.get_rank() % 2)
    try:
        Pipeline(
            toy(), program, loss_fn=loss_fn, mesh=mesh, tensor_plan=TOY_PLAN, example={"input_ids": batch()[0][:2]},
            timeout=60.0,
        )  # fmt: skip
    except RuntimeFault as fault:
        return str(fault)
    return ""


def families(rank: int, world: int, names: list[str], schedules: list[str], **sizes: Any) -> list[dict[str, Any]]:
    """A case for each family and schedule, tied and not, by the family's own plan of styles.

    Each schedule has one form of the loss with a tied table, and the other form without. The first one evaluates, too.

    logits: rows and columns of the largest logits that a step makes here. seed, rounding: as of `steady`.
    """
    cases = []
    for name, tied in product(names, (False, True)):
        of_seed = partial(family, name, **{"tie_word_embeddings": tied, "vocab_size": 80, **sizes})
        with wide_norms():
            seed, rounding, expected = steady(of_seed, lambda model, wide: reference(model, itemgetter("logits"), wide))
            for number, schedule in enumerate(schedules):
                form = ("early", "again")[(number + tied) % 2]
                row = {"family": name, "tied": tied, "schedule": schedule, "form": form}
                row |= {"seed": seed, "rounding": rounding}
                cases.append(
                    row | _case(of_seed(seed), "lm_head", schedule, form, None, expected, evaluated=not number)
                )
    return cases
