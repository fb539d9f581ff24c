"""Runs steps under torch's sanitizer of streams, and prints what it found as one line of JSON.

python -m gpu.watched_steps
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
import torch.cuda._sanitizer as sanitizer

from gpu.families import PLANS, of_plan
from gpu.setting import Setting, setting_of


def races(setting: Setting, plans: Mapping[str, str] = PLANS) -> list[str]:
    """The first race of each plan, in torch's words. The sanitizer raises at the operation that meets it.

    One pipeline rank and one step: the sanitizer keeps a traceback of each operation, which takes milliseconds.
    """
    found = []
    for name, lines in plans.items():
        try:
            of_plan(setting, lines, ranks=1, steps=1)
        except Exception as error:
            if (race := race_behind(error)) is None:
                raise
            found.append(f"{name}: {race}")
    return found


def race_behind(error: BaseException | None) -> str | None:
    """What the sanitizer said, if that caused an error."""
    while error is not None and not isinstance(error, sanitizer.CUDASanitizerErrors):
        error = error.__cause__ or error.__context__
    return None if error is None else "; ".join(str(each) for each in error.errors)


if __name__ == "__main__":
    sanitizer.enable_cuda_sanitizer()
    print(json.dumps(races(setting_of(torch.device("cuda"), 1))))
