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


def json_of(*arguments: str) -> dict[str, Any]:
    """What a command prints with `--json`, also where it ends with findings."""
    facts: dict[str, Any] = json.loads(schedc(*arguments, "--json").stdout)
    return facts
