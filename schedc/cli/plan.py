"""`schedc plan`: what a model holds and computes, and what a cluster gives, as the planner counts them."""

from __future__ import annotations

import json

import click

from schedc.cli.common import EPILOG, json_argument, sizes_argument

_SEQUENCE = 4096


@click.command(epilog=EPILOG)
@click.argument("model", required=False)
@click.argument("cluster", required=False)
@sizes_argument
@click.option("--show-model", is_flag=True, help="Print parameters, FLOPs and held tensors of MODEL, part by part.")
@click.option("--list", "as_list", is_flag=True, help="List the shipped models and clusters with their sources.")
@click.option(
    "--seq", type=click.IntRange(1, 2**31), help=f"Tokens of a sequence; default MODEL's, else {_SEQUENCE:,}."
)
@json_argument
def plan(
    model: str | None,
    cluster: str | None,
    sizes: dict[str, int],
    show_model: bool,
    as_list: bool,
    seq: int | None,
    as_json: bool,
) -> None:
    """Show what MODEL holds and computes, and what CLUSTER gives.

    MODEL is a shipped name, a config.json of Hugging Face or its folder, or a model file in TOML. Nothing of it is
    downloaded or run. CLUSTER is a shipped name or a cluster file in TOML; -D devices=N gives it another size.
    """
    if as_list and not (model or show_model):
        from schedc.report.shipped import library_json, library_text

        facts = library_json()
        click.echo(json.dumps(facts) if as_json else "\n".join(library_text(facts)))
        return
    if as_list or not show_model or model is None:
        raise click.UsageError("say what to show: MODEL --show-model, or --list")
    if other := sorted(sizes.keys() - {"devices"}):
        raise click.UsageError(f"a cluster has no size {other[0]!r}; write -D devices=N")
    if sizes and cluster is None:
        raise click.UsageError("-D devices=N needs a CLUSTER")
    if sizes and sizes["devices"] < 1:
        raise click.UsageError("a cluster has one device at least")
    click.echo(_shown(model, cluster, sizes.get("devices"), seq, as_json))


def _shown(name: str, cluster_name: str | None, devices: int | None, seq: int | None, as_json: bool) -> str:
    from schedc.planner.presets.library import open_cluster, open_model, published_count

    model = open_model(name)
    cluster = open_cluster(cluster_name, devices) if cluster_name is not None else None
    from schedc.report.model import to_json, to_text  # not needed to refuse a file

    facts = to_json(model, seq or model.seq or _SEQUENCE, published_count(name), cluster)
    return json.dumps(facts) if as_json else "\n".join(to_text(facts))
