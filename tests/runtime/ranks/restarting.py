"""Runs a trainer's script, as torchrun would, with a loss that fails in step 4 of the job's first attempt.

python tests/runtime/ranks/restarting.py MICROBATCHES SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import os
import runpy
import sys
from itertools import count

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from schedc_runtime.models import gpt

_calls = count(1)
_loss = gpt.next_token_loss


def failing(output: Tensor, target: Tensor) -> Tensor:
    if not isinstance(output, FakeTensor) and next(_calls) > 3 * microbatches:
        raise ZeroDivisionError("injected")
    return _loss(output, target)


if __name__ == "__main__":
    microbatches = int(sys.argv[1])
    del sys.argv[:2]
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        gpt.next_token_loss = failing
    runpy.run_path(sys.argv[0], run_name="__main__")
