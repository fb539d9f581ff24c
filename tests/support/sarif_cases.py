"""The word `sarif` of `benchmarks/door.py`: findings in SARIF have its form, and places inside of their files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from support.commands import schedc
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
    return {"cases": len(results), "failed": len(wrong), "files": len(files), "fixes": fixes, "wrong": wrong}


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
