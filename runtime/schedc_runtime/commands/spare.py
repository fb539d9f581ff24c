"""What a spare process loads before ranks are forked from it. Importing this file makes a spare of a process."""

from __future__ import annotations

import gc
import os
from importlib import import_module

from schedc.interrupts import end_with
from schedc_runtime.commands.waiting import read_late
from schedc_runtime.ranks.agent import AGENT, SPARE

LOADED = ("schedc_runtime.trainers.checkpoints", "schedc_runtime.ranks.join", "torch._dynamo", "schedc.compiler",
          "schedc.syntax.grammar_tables")  # fmt: skip
"""Modules that every trainer needs. Fake tensors and optimizers load `torch._dynamo`."""

end_with(int(os.environ[AGENT]))
os.environ[SPARE] = str(os.getpid())
for _name in LOADED:
    import_module(_name)
os.waitpid = read_late
gc.freeze()  # the ranks share the memory of what is loaded, until a collection writes to it
