"""``schedc prove``: repeats the evidence of an audit on this machine, and says with which rank it agrees."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from schedc.diagnostics import DiagnosticError, clean
from schedc_runtime.audit.digests import unlike
from schedc_runtime.audit.evidence import Evidence, read_evidence, repeated_here
from schedc_runtime.audit.fitness import ALIKE, device_facts
from schedc_runtime.commands.toy_models import users_model
from schedc_runtime.errors import RuntimeFault

SCHEMA = "schedc.proof/1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Repeat the evidence; return the exit status: 0 the suspect agrees, 3 another rank does, 1 nobody or an error."""
    parser = argparse.ArgumentParser(prog="schedc prove")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True, help="gives (model, loss_fn, batch, targets)")
    parser.add_argument("--threads", type=int, help="of torch; by default as in the run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        evidence = read_evidence(options.folder)
        threads = options.threads or next(iter(evidence.facts["devices"].values()))["threads"]
        torch.set_num_threads(threads)
        subject = users_model(options.model)
        here = repeated_here(evidence, subject.model, subject.loss_fn)
    except (RuntimeFault, DiagnosticError, OSError) as error:
        if options.json:
            print(json.dumps({"schema": SCHEMA, "error": str(error)}))
        print(clean(f"error: {error}"), file=sys.stderr)
        return 1
    agreeing = {name: unlike(each, here, among=_told(evidence)) for name, each in evidence.facts["witnesses"].items()}
    if options.json:
        print(json.dumps({"schema": SCHEMA, **_summary(evidence), "differs": agreeing, "digests": here}))
    else:
        print("\n".join(clean(line) for line in _lines(evidence, agreeing)))
    suspect = evidence.facts["suspect"]
    if not agreeing[suspect]:
        return 0
    return 3 if any(not differs for differs in agreeing.values()) else 1


def _told(evidence: Evidence) -> dict[str, str]:
    """The digests of the suspect, by which all are compared."""
    told: dict[str, str] = evidence.facts["witnesses"][evidence.facts["suspect"]]
    return told


def _summary(evidence: Evidence) -> dict[str, Any]:
    facts = evidence.facts
    return {name: facts[name] for name in ("step", "stage", "suspect", "verdict", "row")}


def _lines(evidence: Evidence, agreeing: dict[str, list[str]]) -> list[str]:
    facts, here = evidence.facts, device_facts(torch.device("cpu"))
    lines = [
        f"step {facts['step']}, stage {facts['stage']}, microbatch {facts['job']['microbatch']} of {facts['suspect']}:"
        f" {facts['row']}",
        f"verdict of the run: {facts['verdict']}",
        f"this machine: {here['device']}, torch {here['torch']}, {here['threads']} threads",
    ]
    for name, differs in agreeing.items():
        device = facts["devices"].get(name, {})
        other = [f"{key} {device[key]}" for key in ALIKE if device and device[key] != here[key]]
        note = f" (there: {', '.join(other)}; other bits may be right)" if other else ""
        lines.append(f"{name}: {'other bits of ' + ', '.join(differs) if differs else 'equal bits'}{note}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
