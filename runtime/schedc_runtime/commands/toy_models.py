"""Small models that the commands train and measure: a GPT, and a transformer like DeepSeek-V3's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from schedc.ir.program import Program
from schedc.plan import ExpertSizes, Plan
from schedc.plan.layout.parts import Layout, PartKind
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.models.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer, losses_of_outputs
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.pipeline.build.chunked_loss import ChunkedLoss
from schedc_runtime.pipeline.build.output_losses import OutputLosses
from schedc_runtime.pipeline.build.stages import layout_of_stages

VOCAB = 64
FEW_EXPERTS = ExpertSizes(16, 2, shared=1)
"""The experts of a toy model whose plan has none."""


class Subject(NamedTuple):
    """What is trained or measured.

    batch, targets: of a microbatch on a rank. A tuple is the positional arguments of the model's forward, a
        dict its keywords.
    """

    model: nn.Module
    loss_fn: Callable[[Any, Any], Any]
    batch: Any
    targets: Any


def toy_model(kind: str, program: Program, plan: Plan, options: argparse.Namespace) -> Subject:
    """The model ``kind`` (``gpt`` or ``moe``), with the layers and experts of the plan if it has them.

    options: those of `schedc_runtime.commands.options.add_sizes`. Every process gets the same weights.
    """
    torch.manual_seed(options.seed)
    layout = layout_of_stages(program)
    if layout is not None and (layout.losses > 1 or layout.embeds_first):
        return _predicting(layout, plan, options, dense=kind == "gpt")
    blocks = layout.layers + layout.total(PartKind.MTP) if layout else program.stages
    blocks = options.blocks or blocks
    if kind == "gpt":
        model: nn.Module = GPT(GPTConfig(VOCAB, options.width, blocks=blocks, context=options.tokens))
    else:
        dense = min(options.dense, blocks)
        model = MoETransformer(_moe(dense, blocks, options.width, plan.experts or FEW_EXPERTS))
    chunked = plan.loss is not None and plan.loss.form != "whole"
    loss_fn = ChunkedLoss("head", mean="microbatch") if chunked else next_token_loss
    return Subject(model, loss_fn, *counted_model(options.rows, options.tokens, options.seed))


def _predicting(layout: Layout, plan: Plan, options: argparse.Namespace, *, dense: bool) -> Subject:
    """A model whose predictions are outputs of their own. dense: whether no layer has experts.

    Raises `RuntimeFault` for a loss in chunks, which such a model does not have.
    """
    if plan.loss is not None and plan.loss.form != "whole":
        raise RuntimeFault(
            f"`loss {plan.loss.form}` beside a layout with an L per output, or with e: each output has logits",
            "write `loss whole`, or one L and no e",
        )
    blocks, predictions = layout.layers, layout.total(PartKind.MTP)
    few = blocks if dense else min(options.dense, blocks)
    config = replace(_moe(few, blocks, options.width, plan.experts or FEW_EXPERTS), predictions=predictions)
    batch, targets = counted_model(options.rows, options.tokens, options.seed)
    return Subject(MoETransformer(config), OutputLosses(losses_of_outputs(predictions)), batch, targets)


def users_model(named: str) -> Subject:
    """The user's own model, from a function ``module:function`` without arguments.

    Raises `RuntimeFault` for a name that leads to no such function.
    """
    where, colon, name = named.partition(":")
    sys.path.insert(0, "")  # modules beside which the command is called, as with `python -m`
    try:
        subject: Any = getattr(import_module(where), name)() if colon else None
    except (ImportError, AttributeError) as error:
        raise RuntimeFault(f"--model {named}: {error}", "write --model module:function") from error
    if (
        not isinstance(subject, tuple)
        or len(subject) != 4
        or not isinstance(subject[0], nn.Module)
        or not callable(subject[1])
    ):
        raise RuntimeFault(
            f"--model {named} is no function that gives (model, loss_fn, batch, targets)",
            "return a module, its loss function, and batch and targets of one microbatch",
        )
    return Subject(*subject)


def toy_plan(plan: Plan) -> Plan:
    """The plan without sizes of its model, which a toy model lacks: columns, bytes, tokens, batch, words, types."""
    experts = None if plan.experts is None else replace(plan.experts, width=0, hidden=0)
    loss = None if plan.loss is None else replace(plan.loss, vocab=0)
    return replace(plan, experts=experts, tokens=0, dtype="", block=None, loss=loss, batch=None, attention=0.0)


def counted_model(rows: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """[rows, tokens] random tokens, and [rows, tokens] targets, each a function of its token."""
    batch = torch.randint(0, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return batch, (5 * batch + 3) % VOCAB


def _moe(dense: int, blocks: int, width: int, experts: ExpertSizes) -> MoEConfig:
    head = max(4, width // 4)
    routing = RouterConfig(
        experts.count, experts.top, scores="sigmoid", scale=2.5, groups=experts.groups,
        limit=experts.limit if experts.groups > 1 else 1, biased=True, bias_rate=0.01, balance=1e-4,
    )  # fmt: skip
    return MoEConfig(
        vocab=VOCAB, width=width, heads=4, dense_blocks=dense, moe_blocks=blocks - dense, inner=2 * width,
        expert_inner=head, shared=experts.shared, routing=routing, query_rank=max(4, width // 2), key_value_rank=head,
        plain=head, rotary=max(2, head // 2 // 2 * 2), value=head,
    )  # fmt: skip
