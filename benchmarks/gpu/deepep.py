"""Section `deepep`: whether the exchange of DeepEP is there, and whether the runtime takes it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from gpu.claims import Bound, Claim
from gpu.setting import NotMeasured, Setting

CLAIMS = (
    Claim(
        "the exchange of DeepEP gives the losses of torch's exchange within 1e-3",
        "experts shared by all GPUs of the machine, bf16, where `deep_ep` is installed",
        (Bound("deepep.close", "==", True),),
    ),
)


def measure(setting: Setting) -> dict[str, Any]:
    if find_spec("deep_ep") is None:
        raise NotMeasured("deep_ep is not installed")
    raise NotMeasured("deep_ep is installed, and this section has no case for it yet")
