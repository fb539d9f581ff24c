"""The commands of `schedc plan` that show what is known: shipped files, models and clusters, predictions of rows."""

from __future__ import annotations

import json
from pathlib import Path

SEQUENCE = 4096
"""Tokens of a sequence where neither the command line nor the model says them."""


def listed(as_json: bool) -> str:
    """The shipped models, clusters and fits."""
    from schedc.report.shipped import library_json, library_text

    facts = library_json()
    return json.dumps(facts) if as_json else "\n".join(library_text(facts))


def model_shown(name: str, cluster_name: str | None, devices: int | None, seq: int | None, as_json: bool) -> str:
    """A model, and a cluster if there is one. devices: size of the cluster; None: its own. seq: tokens."""
    from schedc.planner.presets.library import open_cluster, open_model, published_count

    model = open_model(name)
    cluster = open_cluster(cluster_name, devices) if cluster_name is not None else None
    from schedc.report.model import to_json, to_text  # not needed to refuse a file

    facts = to_json(model, seq or model.seq or SEQUENCE, published_count(name), cluster)
    return json.dumps(facts) if as_json else "\n".join(to_text(facts))


def rows_predicted(path: Path, fit_file: Path | None, force_fit: bool, as_json: bool) -> str:
    """Predictions beside measured rows."""
    from schedc.planner.fit.fitted import load_fit, matched
    from schedc.planner.fit.predict import predict, row_intervals
    from schedc.planner.fit.rows import load_rows
    from schedc.report.predictions import to_json, to_text

    rows = load_rows(path)
    beside = path.with_suffix(".fit.toml")
    fit = load_fit(fit_file or beside) if fit_file or beside.exists() else None
    if fit is not None:
        fit = matched(fit, rows.devices, rows.precisions, force_fit)
    facts = to_json(predict(rows, fit.constants if fit else {}), row_intervals(rows, fit), rows, fit)
    return json.dumps(facts) if as_json else to_text(facts)
