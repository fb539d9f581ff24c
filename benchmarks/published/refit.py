"""Fits every file of this folder, ships the fits that clusters name, and prints what they reach: `python refit.py`.

With names of files, `python refit.py bloom vtrain_multi`, only these.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parents[1] / "schedc" / "planner" / "presets" / "fits"
ONLY = {"zerobubble_t4": "1F1B"}
"""The schedule of a file whose rows are fitted. Rows of other schedules are predicted with their constants."""
HELD_OUT = {"zerobubble_t6": "zerobubble_t4"}
"""Files without a fit, and the fit that predicts their rows."""


def main() -> None:
    names = sys.argv[1:] or [path.stem for path in sorted(HERE.glob("*.csv"))]
    for name in names:
        if name in HELD_OUT:
            predicted(name, HELD_OUT[name])
            continue
        command = [sys.executable, "-m", "schedc", "fit", f"{name}.csv", "--cv", "--json"]
        command += ["--only", ONLY[name]] if name in ONLY else []
        facts = json.loads(subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True).stdout)
        fit = HERE / f"{name}.fit.toml"
        if (shipped := SHIPPED / f"{name}.toml").exists():
            shutil.copyfile(fit, shipped)
        models = {model: round(each["mape_pct"], 1) for model, each in facts["leave_model_out"].items()}
        errors = f"fitted {facts['fit_mape_pct']:5.2f} %, left out {facts['cv_mape_pct']:5.2f} %"
        print(f"{name:<18} {facts['rows']:5} rows: {errors}")
        print(f"  at a bound {facts['at_bound']}, at the prior {facts['at_prior']}")
        print(f"  models {models}")
        print(f"  intervals hold {facts['held_pct']} %, {facts['mean_width_pct']} % wide; factor {facts['factor']}")
        print(f"  regret {facts['regret_top5_pct']}, rank correlation {facts['spearman']}", flush=True)


def predicted(name: str, fit: str) -> None:
    """Prints how far off the predictions of another file's fit are."""
    command = [sys.executable, "-m", "schedc", "plan", "predict", f"{name}.csv", "--fit", f"{fit}.fit.toml", "--json"]
    facts = json.loads(subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True).stdout)
    errors = {called: round(each["mape_pct"], 2) for called, each in facts["by_schedule"].items()}
    print(f"{name:<18} predicted by {fit}: {errors}", flush=True)


if __name__ == "__main__":
    main()
