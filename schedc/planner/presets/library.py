"""Opens models and clusters by what a user types: the name of a shipped one, a file, or the folder of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from schedc.diagnostics import Diagnostic, RequestError, did_you_mean
from schedc.model.sizes import ModelSizes
from schedc.planner.cluster.read import load_cluster, with_devices
from schedc.planner.cluster.values import Cluster
from schedc.planner.model.read import load_model
from schedc.planner.presets.tables import files, tables


@dataclass(frozen=True)
class PublishedCount:
    """What the authors of a model state. parameters: their count. source: the publication, and parts left out."""

    parameters: float
    source: str


def open_model(name_or_path: str) -> ModelSizes:
    """The shipped model of a name, else that of a file, or of the ``config.json`` in a folder.

    Raises `RequestError` (S709) where neither exists, and `DiagnosticError` (S701 to S704) for a file that is none.
    """
    path = _path(name_or_path, "models", "model")
    return load_model(path / "config.json" if path.is_dir() else path)


def open_cluster(name_or_path: str, devices: int | None = None) -> Cluster:
    """The shipped cluster of a name, else that of a file; with another number of devices if ``devices`` says so.

    Raises `RequestError` (S709) where neither exists, and `DiagnosticError` (S705 to S707) for a file that is none.
    """
    cluster = load_cluster(_path(name_or_path, "clusters", "cluster"))
    return cluster if devices is None else with_devices(cluster, devices)


def published_count(name: str) -> PublishedCount | None:
    """What the authors of a shipped model state; None for any other model."""
    if name not in files("models"):
        return None
    table = tables("models")[name]["published"]
    return PublishedCount(float(table["parameters"]), table["source"])


def _path(name: str, kind: str, what: str) -> Path:
    """Raises `RequestError` (S709) for what is neither the name of a shipped file nor a path."""
    if name in (shipped := files(kind)):
        return shipped[name]
    if "\0" not in name and Path(name).exists():
        return Path(name)
    near = did_you_mean(name, shipped)
    help = near if near.startswith("did") else f"`schedc plan list` has the names; a file needs its path, {what}.toml"
    raise RequestError([Diagnostic("S709", f"there is no {what} `{name}`, nor a file of that name", help=help)])
