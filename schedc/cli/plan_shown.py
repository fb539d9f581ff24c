"""The uses of `schedc plan` that show what is known: shipped files, models and clusters, predictions of rows."""

from __future__ import annotations

import json

from schedc.cli.plan_request import PlanRequest

SEQUENCE = 4096
"""Tokens of a sequence where neither the command line nor the model says them."""


def listed(request: PlanRequest) -> str:
    """The shipped models and clusters."""
    from schedc.report.shipped import library_json, library_text

    facts = library_json()
    return json.dumps(facts) if request.as_json else "\n".join(library_text(facts))


def shown(request: PlanRequest) -> str:
    """A model, and a cluster if there is one."""
    from schedc.planner.presets.library import open_cluster, open_model, published_count

    assert request.model is not None
    model = open_model(request.model)
    devices = request.sizes.get("devices")
    cluster = open_cluster(request.cluster, devices) if request.cluster is not None else None
    from schedc.report.model import to_json, to_text  # not needed to refuse a file

    facts = to_json(model, request.seq or model.seq or SEQUENCE, published_count(request.model), cluster)
    return json.dumps(facts) if request.as_json else "\n".join(to_text(facts))


def predicted(request: PlanRequest) -> str:
    """Predictions beside measured rows."""
    from schedc.planner.fit.fitted import load_fit, matched
    from schedc.planner.fit.predict import predict
    from schedc.planner.fit.rows import load_rows
    from schedc.report.predictions import to_json, to_text

    assert request.predict is not None
    rows = load_rows(request.predict)
    beside = request.predict.with_suffix(".fit.toml")
    fit = load_fit(request.fit_file or beside) if request.fit_file or beside.exists() else None
    if fit is not None:
        fit = matched(fit, rows.devices, rows.precisions, request.force_fit)
    facts = to_json(predict(rows, fit.constants if fit else {}), rows, fit)
    return json.dumps(facts) if request.as_json else to_text(facts)
