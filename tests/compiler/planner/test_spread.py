"""How sure constants are: covariances in fit files, what they become on a device, and common draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schedc.diagnostics import DiagnosticError
from schedc.planner.fit.estimate import Estimator
from schedc.planner.fit.fitted import IN_OTHERS, Fit, fit_text, parse_fit
from schedc.planner.fit.rows import load_rows
from schedc.planner.times.constants import BY_NAME, CONSTANTS, NAMES, SUSTAINED
from schedc.planner.times.spread import ConstantSpread, covariance_of, triangle_of
from schedc.planner.times.table import RunTable
from schedc.source import Source
from support.needs import needed
from support.paths import ROOT

VALUES = {"gemm": 0.9, "fp8": 0.7, SUSTAINED + "A": 1.1, SUSTAINED + "B": 0.9, "ep": 0.7}
COVARIANCE = np.array([
    [0.5, 0.3, -0.3, 0.0, 0.0],
    [0.3, 0.6, -0.2, 0.1, 0.0],
    [-0.3, -0.2, 0.4, 0.0, 0.1],
    [0.0, 0.1, 0.0, 0.5, 0.0],
    [0.0, 0.0, 0.1, 0.0, 0.9],
])  # fmt: skip
FIT = Fit("some", ("A", "B"), ("fp8",), 9, "", VALUES, spread=0.03, triangle=triangle_of(COVARIANCE))


def spread(device: str) -> ConstantSpread:
    known = FIT.on(device).known
    assert known is not None
    return known


def test_constants_on_a_device_have_the_spread_of_its_clock() -> None:
    """Shares of peak are a product with the clock; what no row decides has the prior's width, independent."""
    known = spread("A")
    gemm, fp8, ep, hbm = (NAMES.index(name) for name in ("gemm", "fp8", "ep", "hbm"))
    width = {name: BY_NAME[name].width for name in ("gemm", "fp8", "ep", "hbm", "fp4")}
    a, b, clock = width["gemm"], width["fp8"], 0.1
    assert known.logs[gemm, gemm] == pytest.approx(0.5 * a * a - 2 * 0.3 * a * clock + 0.4 * clock**2, rel=1e-3)
    assert known.logs[gemm, fp8] == pytest.approx(
        0.3 * a * b - 0.3 * a * clock - 0.2 * b * clock + 0.4 * clock**2, rel=1e-2
    )
    assert known.logs[gemm, ep] == pytest.approx(0.1 * clock * width["ep"], rel=1e-3)
    assert known.logs[hbm, hbm] == pytest.approx(width["hbm"] ** 2)
    assert not np.delete(known.logs[hbm], hbm).any()
    assert known.median[gemm] == pytest.approx(0.99)
    foreign = spread("C")  # its clock is that of the prior, and independent
    assert foreign.logs[gemm, gemm] == pytest.approx(0.5 * a * a + clock**2, rel=1e-3)
    assert foreign.median[gemm] == 0.9


def test_draws_have_the_covariance_and_are_the_same_for_a_seed() -> None:
    known = spread("A")
    vectors = known.draws(4000, 5)
    logs = np.log(np.array([vectors[name][0] for name in NAMES]) / known.median[:, None])
    bound = np.array([constant.most for constant in CONSTANTS])
    free = np.log(bound / known.median) > 3.5 * np.sqrt(np.diag(known.logs))
    scale = np.sqrt(np.diag(known.logs))
    ratios = (np.cov(logs) - known.logs) / np.outer(scale, scale)
    assert np.abs(ratios[np.ix_(free, free)]).max() < 0.06
    assert (np.array([vectors[name].max() for name in NAMES]) <= bound).all()
    again, other = known.draws(4000, 5), known.draws(4000, 6)
    assert all(np.array_equal(again[name], vectors[name]) for name in NAMES)
    assert not np.array_equal(other["ep"], vectors["ep"])
    few = [np.log(known.draws(200, seed)["ep"]).mean() for seed in range(20)]
    assert np.std(few) < 0.2 * scale[NAMES.index("ep")] / np.sqrt(200)


def test_a_fit_file_keeps_its_covariance() -> None:
    text = fit_text(FIT)
    read = parse_fit(Source("a.fit.toml", text))
    assert (read, fit_text(read)) == (FIT, text)
    assert covariance_of(read.triangle) == pytest.approx(COVARIANCE, abs=1e-3)
    finer = parse_fit(Source("b.fit.toml", text.replace("gemm = [0.7071]", "gemm = [0.70710678]")))
    assert parse_fit(Source("b.fit.toml", fit_text(finer))) == finer != read  # a fit rounds, and its file does not


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gemm = [0.7071]", "gemm = [nan]"),
        ("gemm = [0.7071]", "gemm = [1.1]"),
        ("gemm = [0.7071]", "gemm = [0.7071, 0.1]"),
        ("gemm = [0.7071]", 'gemm = ["a"]'),
        ("gemm = [0.7071]", "gemm = []"),
        ("gemm = [0.7071]\n", ""),
        ("gemm = [0.7071]", "gemm = [-0.7071]"),
        ("[covariance]", "[covariances]"),
        ("spread = 0.03", "spread = 0"),
        ("[device]\ngemm", "[fabric]\ngemm"),
    ],
)
def test_a_covariance_that_is_none_is_refused(old: str, new: str) -> None:
    text = fit_text(FIT)
    assert old in text
    with pytest.raises(DiagnosticError) as caught:
        parse_fit(Source("a.fit.toml", text.replace(old, new, 1)))
    assert {diagnostic.code for diagnostic in caught.value.diagnostics} == {"S725"}


def test_a_file_of_version_1_has_the_widths_of_priors_where_rows_say_nothing() -> None:
    text = ('schema = "schedc.fit/1"\nname = "a"\nrows = 2\ndevices = ["A"]\nprecisions = ["bf16"]\nat_bound = []\n'
            'at_prior = ["ep"]\n[constants]\ngemm = 0.7\nep = 0.6\n')  # fmt: skip
    fit = parse_fit(Source("a.fit.toml", text))
    assert {name: fit.constants[name] for name in IN_OTHERS} == {"host": 1e-9, "expert_launch": 1e-9}
    known = fit.on("A").known
    assert known is not None
    widths = {name: known.widths[name] / BY_NAME[name].width for name in NAMES}
    assert widths == pytest.approx({name: 0.5 if name in ("gemm", *IN_OTHERS) else 1.0 for name in NAMES})


def test_rows_never_widen_a_prior_and_decide_what_they_show() -> None:
    needed("scipy")
    path: Path = ROOT / "benchmarks" / "published" / "korthikanti.csv"
    rows = load_rows(path).rows
    estimator = Estimator(RunTable([row.run for row in rows]), np.array([row.step_s for row in rows]))
    estimate = estimator.estimate(np.arange(len(rows)))
    for factor in (1.0, 3.0):
        covariance = estimate.covariance(factor)
        assert np.diag(covariance).max() <= 1 + 1e-9
        assert np.linalg.eigvalsh(covariance).min() > 0
    widths = dict(zip(estimator.names, np.sqrt(np.diag(estimate.covariance())).tolist(), strict=True))
    assert {name for name, width in widths.items() if width > 0.9} == set(estimate.at_prior)
    assert widths["gemm"] < 0.5
    assert (np.diag(estimate.covariance(3.0)) >= np.diag(estimate.covariance())).all()


def test_a_stack_of_another_fit_is_independent_of_the_device() -> None:
    """Even where both fits have covariances between the constants of all owners."""
    square = np.random.default_rng(2).standard_normal((len(NAMES), 2 * len(NAMES)))
    one, other = (replace(ConstantSpread.of_priors(), logs=factor * square @ square.T) for factor in (1.0, 2.0))
    stack = np.array([constant.owner == "stack" for constant in CONSTANTS])
    mixed = one.with_owner("stack", other).logs
    assert not mixed[np.ix_(stack, ~stack)].any()
    assert (mixed == other.logs)[np.ix_(stack, stack)].all()
    assert (mixed == one.logs)[np.ix_(~stack, ~stack)].all()
