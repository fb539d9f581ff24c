"""Trains a small GPT with a compiled program: what ``schedc run`` starts, also under torchrun.

    python -m schedc_runtime.run --program program.json [--steps N] [--check bitwise] [--trace out.json]

Exit status: 0 done, 1 the check or the run failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedc.cost.costs import dump_costs
from schedc.diagnostics import DiagnosticError
from schedc.ir.load import load_program
from schedc.ir.program import Program
from schedc.layout.parts import Kind
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.executor import Deadlock, InstructionError
from schedc_runtime.gpt import GPT, GPTConfig, next_token_loss
from schedc_runtime.launch import launch, launched
from schedc_runtime.losses import Leftovers
from schedc_runtime.partition import partition
from schedc_runtime.pipeline import Pipeline
from schedc_runtime.placing import layout_of
from schedc_runtime.reference import Microbatch, Reference, reference_step
from schedc_runtime.signature import split
from schedc_runtime.trace import chrome_trace, compare, measured_costs

_VOCAB = 64


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    try:
        program = load_program(Path(options.program).read_text(encoding="utf-8"), options.program)
    except (OSError, UnicodeDecodeError) as error:
        print(f"error: cannot read the program: {error}", file=sys.stderr)
        return 2
    except DiagnosticError as error:
        print(error, file=sys.stderr)
        return 1
    if not launched() and program.ranks > 1 and not options.in_process:
        return launch("schedc_runtime.run", arguments, program.ranks)
    try:
        return _train(program, options)
    except (RuntimeFault, InstructionError, Deadlock, Leftovers) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


def _train(program: Program, options: argparse.Namespace) -> int:
    device = _join(program, options)
    torch.manual_seed(options.seed)
    sizes = GPTConfig(_VOCAB, options.width, blocks=options.blocks or _blocks(program), context=options.tokens)
    model = GPT(sizes).to(device)
    twin = _Twin(copy.deepcopy(model), program, options.learning_rate) if options.check == "bitwise" else None
    pipe = Pipeline(model, program, loss_fn=next_token_loss, in_process=options.in_process, timeout=options.timeout)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=options.learning_rate)
    generator = torch.Generator().manual_seed(options.seed)
    status = 0
    for step in range(1, options.steps + 1):
        batch = torch.randint(0, _VOCAB, (options.rows * program.microbatches, options.tokens), generator=generator)
        targets = (5 * batch + 3) % _VOCAB
        batch, targets = batch.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = pipe.step(batch, targets, trace=bool(options.trace) and step == options.steps)
        verdict = ""
        if twin is not None:
            wrong = [
                x for part in pipe.control.gather("the check", twin.check(pipe, loss, batch, targets)) for x in part
            ]
            verdict = (
                f"  differs from the serial reference: {', '.join(wrong[:4])}" if wrong else "  = reference, bitwise"
            )
            status |= bool(wrong)
        optimizer.step()
        _say(pipe, f"step {step}: loss {loss.item():.6f}{verdict}")
    if options.trace:
        _write_trace(pipe, Path(options.trace))
    if twin is not None:
        _say(
            pipe, "check failed" if status else f"check passed: loss and gradients of {options.steps} steps, all ranks"
        )
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _blocks(program: Program) -> int:
    """As many blocks as the plan of the program has layers and predictions, or one per stage."""
    layout = layout_of(program)
    return layout.layers + layout.total(Kind.MTP) if layout else program.stages


class _Twin:
    """The whole model on every rank, trained by the serial reference alone: what the pipeline must equal."""

    def __init__(self, model: nn.Module, program: Program, learning_rate: float) -> None:
        self.program = program
        self.named = dict(model.named_parameters())
        self.partition = partition(model, program.stages, placement=program.placement, layout=layout_of(program))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)

    def check(self, pipe: Pipeline, loss: Tensor, batch: Tensor, targets: Tensor) -> list[str]:
        """Names of what differs, of this rank's part; then takes the reference's own optimizer step."""
        expected = self._step(batch, targets)
        wrong = [] if torch.equal(loss, expected.loss) else ["loss"]
        for name, parameter in pipe.named_parameters():
            grad = expected.grads.get(name)
            if grad is None or parameter.grad is None or not torch.equal(parameter.grad, grad):
                wrong.append(name)
        return wrong

    def _step(self, batch: Tensor, targets: Tensor) -> Reference:
        count = self.program.microbatches
        microbatches: list[Microbatch] = [((part,), {}) for part in split(batch, count, batch.device)]
        expected = reference_step(
            self.partition, self.program, microbatches, split(targets, count, batch.device), next_token_loss
        )
        for name, parameter in self.named.items():
            parameter.grad = expected.grads.get(name)
        self.optimizer.step()
        return expected


def _join(program: Program, options: argparse.Namespace) -> torch.device:
    """Join the other ranks; the device of this one: a GPU each where there are enough, else the CPU."""
    if options.in_process or not launched():
        torch.set_num_threads(1)
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")
    return device


def _write_trace(pipe: Pipeline, path: Path) -> None:
    """The last step's Chrome trace, and beside it its costs as a file that ``schedc check --cost-file`` takes."""
    intervals = pipe.trace()
    if pipe.rank != 0:
        return
    costs = measured_costs(pipe.program, [intervals])
    path.write_text(json.dumps(chrome_trace(pipe.program, intervals)), encoding="utf-8")
    cost_path = path.with_suffix(".costs.toml")
    cost_path.write_text(dump_costs(costs), encoding="utf-8")
    _say(pipe, f"trace: {path} (opens in ui.perfetto.dev); costs in ms: {cost_path}")
    _say(pipe, compare(pipe.program, costs, intervals).table())


def _say(pipe: Pipeline, text: str) -> None:
    if pipe.rank == 0:
        print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="schedc_runtime.run", description="Train a small GPT with a program.")
    parser.add_argument("--program", required=True, help="program.json, as schedc compile writes it")
    parser.add_argument(
        "--check", choices=["none", "bitwise"], default="none", help="compare with the serial reference"
    )
    parser.add_argument("--steps", type=_positive, default=3)
    parser.add_argument("--trace", metavar="OUT.json", help="write a Chrome trace of the last step, and its costs")
    parser.add_argument(
        "--in-process", action="store_true", help="all ranks in this process, without torch.distributed"
    )
    parser.add_argument("--blocks", type=_positive, help="layers (default: those of the plan, else one per stage)")
    parser.add_argument("--width", type=_positive, default=64)
    parser.add_argument("--tokens", type=_positive, default=32, help="per row")
    parser.add_argument("--rows", type=_positive, default=2, help="per microbatch")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a rank waits for another")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


if __name__ == "__main__":
    sys.exit(main())
