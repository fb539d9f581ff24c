"""The word `sarif` of `benchmarks/door.py`: findings in SARIF have its form, and places inside of their files."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from schedc.editor.findings import findings
from schedc.report.findings import to_sarif
from schedc.source import Source
from support.commands import schedc
from support.fix_cases import TEXTS
from support.needs import SARIF_SCHEMA, lacking
from support.paths import ROOT

MISTAKES = sorted((ROOT / "examples" / "mistakes").glob("*.sched"))


def sarif() -> dict[str, Any]:
    """All mistakes in one call."""
    log = json.loads(schedc("check", *map(str, MISTAKES), "--format", "sarif").stdout)
    (run,) = log["runs"]
    results = run["results"]
    wrong = [fault for result in results for fault in result_faults(result, run["tool"]["driver"]["rules"])]
    wrong += [] if (log["version"], run["columnKind"]) == ("2.1.0", "unicodeCodePoints") else ["head"]
    files = {place_of(result)["artifactLocation"]["uri"] for result in results}
    wrong += [] if len(files) == len(MISTAKES) else ["a mistake has no finding"]
    fixes = sum("fixes" in result for result in results)
    figures = {"cases": len(results), "failed": len(wrong), "files": len(files), "fixes": fixes, "wrong": wrong}
    if not lacking("sarif"):
        refused = [f"{name}: {fault}" for name, each in logs().items() for fault in published_faults(each)]
        figures |= {"failed": len(wrong + refused), "logs": len(logs()), "wrong": wrong + refused}
    return figures


@functools.cache
def logs() -> dict[str, Any]:
    """The log of all mistakes, and one for each text with a finding."""
    whole = schedc("check", *map(str, MISTAKES), "--format", "sarif").stdout
    texts = {name: to_sarif(findings(Source("a.sched", text))) for name, text in TEXTS.items()}
    return {name: json.loads(text) for name, text in {"mistakes": whole, **texts}.items()}


def published_faults(log: dict[str, Any]) -> list[str]:
    """What the published schema of SARIF 2.1.0 refuses in a log, formats of addresses included."""
    found = published().iter_errors(log)
    return [f"{'/'.join(map(str, each.instance_path))}: {each.message[-200:]}" for each in found]


@functools.cache
def published() -> Any:
    import jsonschema_rs

    text = SARIF_SCHEMA.read_text(encoding="utf-8").replace("{2}]?$", "{2}$")  # a pattern with a stray bracket
    return jsonschema_rs.validator_for(json.loads(text), validate_formats=True)


def place_of(result: dict[str, Any]) -> dict[str, Any]:
    place: dict[str, Any] = result["locations"][0]["physicalLocation"]
    return place


def result_faults(result: dict[str, Any], rules: list[dict[str, Any]]) -> list[str]:
    """Faults of a result in rule, message, labels and places."""
    code, rule = result["ruleId"], rules[result["ruleIndex"]]
    checks = {
        "rule": rule["id"] == code and rule["shortDescription"]["text"] and code in rule["help"]["text"],
        "message": result["message"]["text"] and result["level"] in ("error", "warning", "note"),
        "labels": all(each["message"]["text"] for each in result.get("relatedLocations", ())),
    }
    places = [each["physicalLocation"] for each in (*result["locations"], *result.get("relatedLocations", ()))]
    for change in (change for fix in result.get("fixes", ()) for change in fix["artifactChanges"]):
        regions = [each["deletedRegion"] for each in change["replacements"]]
        places += [{"artifactLocation": change["artifactLocation"], "region": region} for region in regions]
    checks["places"] = all(map(lies_inside, places))
    return [f"{code} {name}" for name, right in checks.items() if not right]


def lies_inside(place: dict[str, Any]) -> bool:
    """Whether a place has the address of a file, and its region lies in the text."""
    uri = place["artifactLocation"]["uri"]
    if not re.fullmatch(r"[A-Za-z0-9/._~%-]+", uri):
        return False
    region = place.get("region")
    if region is None:
        return True
    lines = Path(ROOT, unquote(uri)).read_text(encoding="utf-8").split("\n")
    start, end = ((region[f"{side}Line"], region[f"{side}Column"]) for side in ("start", "end"))
    inside = all(1 <= line <= len(lines) and 1 <= column <= len(lines[line - 1]) + 1 for line, column in (start, end))
    return inside and start <= end
