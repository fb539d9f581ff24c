"""The words of CUDA stand in one file of the runtime: elsewhere the seam `device/` is asked."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

WORDS = re.compile(r"cuda|record_stream|pin_memory|is_pinned|nccl", re.IGNORECASE)
RUNTIME = ROOT / "runtime" / "schedc_runtime"
ALLOWED = (RUNTIME / "device" / "cuda.py", RUNTIME / "measure")
IMPORTS = "from schedc_runtime.device import cuda as gpu"
"""The line of `device/choice.py` that imports the file itself."""
STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def words(text: str) -> Iterator[tuple[int, str]]:
    """(line, token) of names with one of the words, and of strings without a space: sentences are for people."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        spoken = token.type in STRINGS and re.search(r"\s", token.string)
        if token.type in {tokenize.NAME, *STRINGS} and not spoken and WORDS.search(token.string):
            yield token.start[0], token.string


@pytest.mark.slow
def test_one_file_of_the_runtime_names_the_device() -> None:
    found: list[str] = []
    for path in sorted(RUNTIME.rglob("*.py")):
        if not any(path.is_relative_to(allowed) for allowed in ALLOWED):
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines()
            known = IMPORTS if path == RUNTIME / "device" / "choice.py" else None
            found += [
                f"{path.relative_to(ROOT)}:{line}: {word}" for line, word in words(text) if lines[line - 1] != known
            ]
    assert found == [], "ask the device (schedc_runtime.device.choice)"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("torch.cuda.Stream()", ["cuda"]),
        ("if tensor.is_cuda: pass", ["is_cuda"]),
        ("torch.empty(1, pin_memory=True)", ["pin_memory"]),
        ("device.type == 'cuda'", ["'cuda'"]),
        ("f'{place}:nccl'", [":nccl" if hasattr(tokenize, "FSTRING_MIDDLE") else "f'{place}:nccl'"]),
        ("raise ValueError('needs nccl')  # CUDA", []),
    ],
)
def test_words_are_seen(line: str, found: list[str]) -> None:
    assert [word for _, word in words(line)] == found


def test_the_file_itself_has_them() -> None:
    assert len(list(words(Path(ALLOWED[0]).read_text(encoding="utf-8")))) > 20
