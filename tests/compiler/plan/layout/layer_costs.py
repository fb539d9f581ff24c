"""A file of layer costs, for the tests of layouts."""

from __future__ import annotations

COSTS = """schema = "schedc.layer-costs/1"

[time]
moe = 1.4
head = 0.9

[parameters]
moe = 3.0

[ops]
W = 0.5
"""
