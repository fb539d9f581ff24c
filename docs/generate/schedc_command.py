"""Runs one `schedc` command line in a folder of its own, for pages that show what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping

from click.testing import CliRunner

from schedc.cli import main


def output_of(*arguments: str, files: Mapping[str, str] | None = None, findings: bool = True) -> str:
    """What `schedc` prints, with or without its findings; ``files`` lie in its current folder."""
    runner = CliRunner()
    with runner.isolated_filesystem() as folder:
        for name, text in (files or {}).items():
            with open(name, "w", encoding="utf-8") as file:
                file.write(text)
        result = runner.invoke(main, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return re.sub(re.escape(folder) + "/", "", result.output if findings else result.stdout)
