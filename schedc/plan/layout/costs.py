"""Costs of a model's parts (time, parameters, activations by kind), and the costs of stages that follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, did_you_mean
from schedc.ir.arrays import Floats, Int64
from schedc.plan.layout.parts import WORK, Layout, Model
from schedc.source import Source
from schedc.step.costs.checks import problem, validated
from schedc.step.costs.costs import Costs, parse_toml


class PerKind(NamedTuple):
    """One number for each kind of part that costs something; a padding costs nothing."""

    embedding: float = 0.0
    dense: float = 1.0
    moe: float = 1.0
    mtp: float = 1.0
    head: float = 0.0


_LAYERS = PerKind()
_NOTHING = PerKind(dense=0.0, moe=0.0, mtp=0.0)


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the parts of a model.

    time: per microbatch and kind, in any one unit. F, I, W: factors; a stage's F takes the sum of its parts' times
    multiplied by ``F``, and so for I and W. p2p: latency of a message between two ranks, in the same unit.
    parameters: memory that a part holds all the time. activations: memory that a microbatch holds in a part from F to
    its backward. Both are in any one unit. The head is that of all outputs: several heads share its time and
    activations, and each holds all of its parameters. A prediction's parameters have its own table of the embedding,
    which its stage does not hold where the first stage embeds for it.
    """

    time: PerKind = _LAYERS
    parameters: PerKind = _NOTHING
    activations: PerKind = _LAYERS
    F: float = 1.0
    I: float = 1.0  # noqa: E741
    W: float = 1.0
    p2p: float = 0.0
    source: Source | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_options(cls, options: Iterable[str], base: LayerCosts | None = None) -> LayerCosts:
        """Costs of ``KEY=NUMBER`` options over those of ``base``.

        KEY is a kind (its time), F, I, W or p2p, or parameters.KIND or activations.KIND. Raises `DiagnosticError` with
        every wrong option (S401, S402, S403).
        """
        costs = base or cls()
        findings: list[Diagnostic] = []
        for option in options:
            source = Source(f"--cost {option}", option)
            key, equals, text = (part.strip() for part in option.partition("="))
            if not equals:
                help = "write KEY=NUMBER, as moe=1.5"
                findings.append(problem("S403", f"`{option}` is not a cost", source, help=help))
                continue
            table, _, kind = key.rpartition(".")
            table = table or ("ops" if kind in _OPS else "time")
            if table not in TABLES:
                findings.append(problem("S401", f"`{key}` is no cost", source, key, help=did_you_mean(table, TABLES)))
                continue
            costs, wrong = _with(costs, table, {kind: _number(text)}, source)
            findings += wrong
        if findings:
            raise DiagnosticError(findings)
        return costs

    def per_stage(self, layout: Layout, name: str = "time") -> Floats:
        """[stages] sum of ``time``, ``parameters`` or ``activations`` over the parts of each stage, in its unit."""
        if name == "parameters":
            return np.asarray(layout.counts[:, : len(WORK)] @ self._parameters_each(layout))
        return np.asarray(layout.shares @ np.array(getattr(self, name), np.float64))

    def parameters_in(self, layout: Layout) -> Floats:
        """[stages, kinds of `WORK`] memory of the parameters of the parts of each stage, in its unit."""
        return np.asarray(layout.counts[:, : len(WORK)] * self._parameters_each(layout))

    def _parameters_each(self, model: Layout | Model) -> Floats:
        """[kinds of `WORK`] memory of the parameters of one part of each kind."""
        return np.array(self.parameters_of(model), np.float64)

    def parameters_of(self, model: Layout | Model) -> PerKind:
        """Memory of the parameters of one part of each kind, in any unit. A prediction may need no table of its own."""
        each = self.parameters
        return each._replace(mtp=max(0.0, each.mtp - each.embedding)) if model.embeds_first else each

    def of(self, layout: Layout) -> Costs:
        """The costs of the stages of a layout, which timelines and memory are computed from."""
        time, activation = self.per_stage(layout), tuple(self.per_stage(layout, "activations").tolist())
        F, I, W = (tuple((time * factor).tolist()) for factor in (self.F, self.I, self.W))  # noqa: E741
        # The embedding of predictions travels beside the state to the last of them: over nearly all boundaries.
        p2p = self.p2p * (2 if layout.embeds_first else 1)
        return Costs(F=F, I=I, W=W, p2p=p2p, activation=activation, pending_weight=activation)


def over_parts(counts: Floats | Int64, of_parts: Floats) -> Floats:
    """[..., stages] sums over the parts of stages, kind after kind, so that equal numbers have equal sums.

    counts: [..., stages, kinds] parts of each kind. of_parts: [..., kinds] the amount of a part; both broadcast.
    """
    total = counts[..., 0] * of_parts[..., None, 0]
    for kind in range(1, of_parts.shape[-1]):
        total = total + counts[..., kind] * of_parts[..., None, kind]
    return np.asarray(total)


SCHEMA = "schedc.layer-costs/1"
_OPS = ("F", "I", "W", "p2p")
TABLES = {"time": PerKind._fields, "parameters": PerKind._fields, "activations": PerKind._fields, "ops": _OPS}


def load_layer_costs(path: str | Path) -> LayerCosts:
    """The costs of a file. Raises `DiagnosticError` for one that cannot be read (S405) or is wrong (S401, S402)."""
    try:
        text = Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DiagnosticError([problem("S405", f"cannot read the cost file `{path}`: {error}", None)]) from error
    return parse_layer_costs(Source(str(path), text))


def parse_layer_costs(source: Source) -> LayerCosts:
    """The costs of a TOML text: ``schema``, tables [time], [parameters], [activations] by kind, and [ops] F, I, W, p2p.

    Everything but the schema is optional. Raises `DiagnosticError` with everything that is wrong (S401, S402, S405).
    """
    values = parse_toml(source)
    schema = values.pop("schema", None)
    findings: list[Diagnostic] = []
    if schema != SCHEMA:
        wrong_schema = "no schema" if schema is None else f"schema {schema!r}"
        help = f'write schema = "{SCHEMA}"'
        findings.append(problem("S405", f"a file of layer costs with {wrong_schema}", source, "schema", help=help))
    costs = LayerCosts(source=source)
    for name, table in values.items():
        if name not in TABLES:
            help = did_you_mean(name, TABLES)
            findings.append(problem("S401", f"`{name}` is no part of a file of layer costs", source, name, help=help))
        elif not isinstance(table, dict):
            findings.append(problem("S402", f"`{name}` is not a table", source, name, help=f"write [{name}]"))
        else:
            costs, wrong = _with(costs, name, table, source)
            findings += wrong
    if findings:
        raise DiagnosticError(findings)
    return costs


def _with(
    costs: LayerCosts, table: str, values: Mapping[str, object], source: Source
) -> tuple[LayerCosts, list[Diagnostic]]:
    """The costs with the good values of one table, and findings about its other values."""
    good, findings = validated(values, TABLES[table], source)
    numbers: dict[str, Any] = {}
    for key, value in good.items():
        if isinstance(value, tuple):
            findings.append(problem("S402", f"`{key}` is a list: one number for all layers of a kind", source, key))
        else:
            numbers[key] = value
    changed = numbers if table == "ops" else {table: getattr(costs, table)._replace(**numbers)}
    return replace(costs, **changed), findings


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text
