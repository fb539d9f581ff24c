"""Runs the command `schedc` in this process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from schedc.cli import main


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def facts_of(*arguments: str) -> dict[str, Any]:
    result = schedc(*arguments, "--json")
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts
