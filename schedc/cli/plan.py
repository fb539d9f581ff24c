"""`schedc plan`: what a model holds and computes, and what a cluster gives, as the planner counts them."""

from __future__ import annotations

import json
from pathlib import Path

import click

from schedc.cli.common import EPILOG, json_argument, sizes_argument

_SEQUENCE = 4096


@click.command(epilog=EPILOG)
@click.argument("model", required=False)
@click.argument("cluster", required=False)
@sizes_argument
@click.option("--show-model", is_flag=True, help="Print parameters, FLOPs and held tensors of MODEL, part by part.")
@click.option("--list", "as_list", is_flag=True, help="List the shipped models, clusters and fits with their sources.")
@click.option(
    "--seq", type=click.IntRange(1, 2**31), help=f"Tokens of a sequence; default MODEL's, else {_SEQUENCE:,}."
)
@click.option(
    "--predict",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="ROWS.csv",
    help="Predict measured steps, as `schedc fit` reads them, and print predictions beside measurements.",
)
@click.option(
    "--fit",
    "fit_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="X.fit.toml",
    help="With --predict: the fit to use; default the one beside ROWS, else the priors.",
)
@click.option("--force-fit", is_flag=True, help="Use a fit of another device or precision, and say so in the output.")
@json_argument
def plan(
    model: str | None,
    cluster: str | None,
    sizes: dict[str, int],
    show_model: bool,
    as_list: bool,
    seq: int | None,
    predict: Path | None,
    fit_file: Path | None,
    force_fit: bool,
    as_json: bool,
) -> None:
    """Show what MODEL holds and computes, and what CLUSTER gives.

    MODEL is a shipped name, a config.json of Hugging Face or its folder, or a model file in TOML. Nothing of it is
    downloaded or run. CLUSTER is a shipped name or a cluster file in TOML; -D devices=N gives it another size.
    --predict ROWS.csv needs neither.
    """
    if predict is not None:
        if model or show_model or as_list:
            raise click.UsageError("--predict takes the models from ROWS.csv; give no MODEL")
        click.echo(_predicted(predict, fit_file, force_fit, as_json))
        return
    if fit_file is not None or force_fit:
        raise click.UsageError("--fit and --force-fit need --predict ROWS.csv")
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


def _predicted(path: Path, fit_file: Path | None, forced: bool, as_json: bool) -> str:
    from schedc.planner.fit.fitted import load_fit, matched
    from schedc.planner.fit.predict import predict
    from schedc.planner.fit.rows import load_rows
    from schedc.report.predictions import to_json, to_text

    rows = load_rows(path)
    beside = path.with_suffix(".fit.toml")
    fit = load_fit(fit_file or beside) if fit_file or beside.exists() else None
    if fit is not None:
        fit = matched(fit, rows.devices, rows.precisions, forced)
    facts = to_json(predict(rows, fit.constants if fit else {}), rows, fit)
    return json.dumps(facts) if as_json else to_text(facts)


def _shown(name: str, cluster_name: str | None, devices: int | None, seq: int | None, as_json: bool) -> str:
    from schedc.planner.presets.library import open_cluster, open_model, published_count

    model = open_model(name)
    cluster = open_cluster(cluster_name, devices) if cluster_name is not None else None
    from schedc.report.model import to_json, to_text  # not needed to refuse a file

    facts = to_json(model, seq or model.seq or _SEQUENCE, published_count(name), cluster)
    return json.dumps(facts) if as_json else "\n".join(to_text(facts))
