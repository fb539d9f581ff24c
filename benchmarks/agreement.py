"""Measures what comparing the ranks' modes, frozen parameters, settings and batches costs at each step.

    python benchmarks/agreement.py [--json] [--repetitions 25]

Instrument: processor time of the process on one thread. Steps of a small model with experts (P = 1, four microbatches)
take turns with the digests of facts and the checksums of batch and targets. Every step sends both along. The least of
each counts. Nothing changes in between, as in training.

Printed: `step_ms`, `digests_us`, `given_us` (checksums), `changed_us` (with the facts forgotten each time),
`share_of_step` (digests and checksums over step).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from figures import give, parser_of

import schedc
from schedc_runtime import Pipeline
from schedc_runtime.models.gpt import next_token_loss
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.pipeline.agree.contents import GivenBatches
from schedc_runtime.ranks.attendance import counter_share


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repetitions", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    give(measured(options.repetitions), options)


def measured(repetitions: int) -> dict[str, float]:
    """Milliseconds of a step, microseconds of digests and checksums, and their ratio."""
    torch.manual_seed(0)
    tokens = torch.arange(8 * 16).reshape(8, 16) % 64
    program, model = schedc.compile("1f1b", P=1, M=4), MoETransformer(MoEConfig(vocab=64))
    pipe = Pipeline(model, program, loss_fn=next_token_loss, in_process=True, example=tokens)
    facts, batches, members = pipe._runner.facts, GivenBatches(later=False), (0, 1)

    def given() -> None:
        batches.begin("step", tokens, tokens)
        counter_share(0, 2, 1, batches.alike({"batch": members, "targets": members}), tells=False)

    def changed() -> None:
        facts.refresh()  # not counted: modules are looked up once
        started.append(time.process_time())
        facts.digests(True, True)

    started: list[float] = []
    works: dict[str, Callable[[], Any]] = {
        "step": lambda: pipe.step(tokens, tokens),
        "digests": lambda: facts.digests(True, True),
        "given": given,
        "changed": changed,
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(3):
        pipe.step(tokens, tokens)
    for _ in range(repetitions):
        for name, work in works.items():
            facts.digests(True, True)
            begin = time.process_time()
            work()
            times[name].append(time.process_time() - (started.pop() if started else begin))
    step, digests, compared, anew = (min(values) for values in times.values())
    return {
        "step_ms": step * 1e3, "digests_us": digests * 1e6, "given_us": compared * 1e6, "changed_us": anew * 1e6,
        "share_of_step": (digests + compared) / step,
    }  # fmt: skip


if __name__ == "__main__":
    main()
