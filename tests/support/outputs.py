"""Holds the JSON that commands print in tests against the table of outputs, in its closed form."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from click.testing import CliRunner, Result

from schedc.schemas.document import json_schema
from schedc.schemas.shapes import outputs


@functools.cache
def validator(name: str, closed: bool = True) -> Any:
    """What judges an output. closed: also fields that the table does not name."""
    import jsonschema_rs

    return jsonschema_rs.validator_for(json_schema(name, closed))


def faults(facts: dict[str, Any]) -> list[str]:
    """What is wrong with an output, each with its place. One that says more than a failure is judged as none."""
    name = facts.get("schema")
    if name not in outputs():
        return [f"the table of outputs has no {name!r}"]
    own = validator(name)
    if outputs()[name].fails and facts.keys() != {"schema", "version", "diagnostics"}:
        own = _whole(name)
    found = own.iter_errors(facts)
    return [f"{name}/{'/'.join(map(str, each.instance_path))}: {each.message[-300:]}" for each in found]


@functools.cache
def _whole(name: str) -> Any:
    """What judges the output itself, and not what may be printed in its place."""
    import jsonschema_rs

    document = json_schema(name, closed=True)
    return jsonschema_rs.validator_for(document["anyOf"][0] | {"$defs": document["$defs"]})


def hold_outputs() -> None:
    """From here on, what a command prints with `--json` in this process has the form of the table."""
    CliRunner.invoke = _held(CliRunner.invoke)  # type: ignore[method-assign]


def _held(invoke: Callable[..., Result]) -> Callable[..., Result]:
    @functools.wraps(invoke)
    def held(self: CliRunner, cli: Any, args: Any = None, *more: Any, **options: Any) -> Result:
        result = invoke(self, cli, args, *more, **options)
        if args and "--json" in args and result.stdout.startswith("{"):
            facts = json.loads(result.stdout)
            assert not (wrong := faults(facts)), (args, wrong)
        return result

    return held
