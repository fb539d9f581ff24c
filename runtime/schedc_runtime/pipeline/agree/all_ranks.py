"""Work that every rank does alike: all ranks go on, or all raise the error of the first rank that refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from schedc_runtime.checkpoint.committed import FlawedStep
from schedc_runtime.errors import MaterializeError, RuntimeFault
from schedc_runtime.pipeline.agree.guard import FailureGuard

Result = TypeVar("Result")


def on_all_ranks(
    guard: FailureGuard,
    what: str,
    work: Callable[[], Result],
    told: Callable[[Result], Any] = lambda _: None,
    raised: type[RuntimeFault] = MaterializeError,
) -> tuple[Result, list[Any]]:
    """The result of ``work`` here, and [ranks] what ``told`` says of each rank's.

    A collective. A `RuntimeFault`, and an error of a disk or of a full memory, is raised on every rank alike, as
    ``raised``. The pipeline stays usable.
    """
    results: list[Result] = []
    control = guard.control
    try:
        results.append(work())
        answer = ["", told(results[0])]
    except RuntimeFault as fault:
        answer = [f"{fault.message}\n{fault.help}", isinstance(fault, FlawedStep)]
    except OSError as error:
        answer = [f"{control.name}: {error}\nlook at the disk", False]
    except (MemoryError, torch.OutOfMemoryError) as error:
        answer = [f"{control.name}: {error}\nleave more memory free", False]
    with guard(what):
        answers = control.gather(what, answer)
    refused = sorted((each for each in answers if each[0]), key=lambda each: each[1])
    if refused:
        message, _, remedy = refused[0][0].rpartition("\n")
        raise (FlawedStep if refused[0][1] else raised)(message, remedy)
    return results[0], [each[1] for each in answers]
