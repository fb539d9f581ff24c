"""`schedc list`, `explain` and `schema`: the library, diagnostic codes, and forms of JSON."""

from __future__ import annotations

import json
from textwrap import fill

import click

from schedc.cli.common import EPILOG, WIDEST, json_argument
from schedc.cli.completion import complete_code, complete_output


@click.command("list", epilog=EPILOG)
@json_argument
def list_command(as_json: bool) -> None:
    """List the schedules of the library."""
    from schedc.load.library import library

    entries = [entry._asdict() for entry in library()]
    if as_json:
        click.echo(json.dumps({"schema": "schedc.list", "version": 1, "schedules": entries}))
        return
    width = max(len(str(entry["name"])) for entry in entries)
    for entry in entries:
        click.echo(_entry(f"{entry['name']:<{width}}", entry["title"]))


def _entry(word: str, meaning: object) -> str:
    """A word and its meaning, in lines of at most `WIDEST` characters."""
    return fill(str(meaning), WIDEST, initial_indent=f"{word}  ", subsequent_indent=" " * (len(word) + 2))


@click.command(epilog=EPILOG)
@click.argument("code", required=False, shell_complete=complete_code)
def explain_command(code: str | None) -> None:
    """Explain a diagnostic code, with a wrong and a right example.

    Without CODE all codes are listed.
    """
    from schedc.codes import CODES, FAMILIES
    from schedc.diagnostics import did_you_mean

    if code is None:
        for family, title in FAMILIES.items():
            click.echo(f"{family}  {title}")
            for entry in CODES.values():
                if entry.code.startswith(family):
                    click.echo(_entry(f"  {entry.code}", entry.title))
        return
    row = CODES.get(code.upper())
    if row is None:
        near = did_you_mean(code.upper(), CODES) or "`schedc explain` lists them"
        raise click.UsageError(f"no diagnostic code {code!r}; {near}")
    click.echo(f"{row.code}: {row.title}\n\n{fill(row.explanation.strip(), WIDEST)}")
    for title, example in (("Wrong", row.wrong), ("Right", row.right)):
        if example:
            click.echo(f"\n{title}:\n\n" + "\n".join(f"    {line}" for line in example.strip().split("\n")))


@click.command(epilog=EPILOG)
@click.argument("name", required=False, shell_complete=complete_output)
def schema_command(name: str | None) -> None:
    """Print the JSON Schema of an output.

    NAME is the text in the field `schema` of the output. Without NAME all outputs are listed.
    """
    from schedc.diagnostics import did_you_mean
    from schedc.schemas.document import json_schema
    from schedc.schemas.shapes import outputs

    if name is None:
        width = max(map(len, outputs()))
        for shape in outputs().values():
            click.echo(_entry(f"{shape.name:<{width}}", shape.says.replace("`", "")))
        return
    if name not in outputs():
        near = did_you_mean(name, outputs()) or "`schedc schema` lists them"
        raise click.UsageError(f"no output has the schema {name!r}; {near}")
    click.echo(json.dumps(json_schema(name), indent=2))
