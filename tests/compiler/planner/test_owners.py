"""Constants by owner: device and fabric by the cluster, one stack on all of them, and what is borrowed is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.diagnostics import DiagnosticError, RequestError
from schedc.planner.cluster.read import load_cluster
from schedc.planner.fit.fitted import fit_text, load_fit, parse_fit
from schedc.planner.fit.plan_constants import PlanConstants, constants_for
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.presets.tables import DEFAULT_STACK, files
from schedc.planner.price.waterfall import waterfall
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.search.result import FoundPlan
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.constants import BY_NAME, CONSTANTS, NAMES
from schedc.planner.times.problem import PlanProblem
from schedc.planner.times.spread import ConstantSpread
from schedc.source import Source
from support.sweeps import halved

PLAIN = "cp == 1 and recompute == none and layout == even and schedule in 1f1b, interleaved_1f1b"


def best(model: str, cluster: str, batch: int, seq: int, stack: str) -> FoundPlan:
    """The best plan on 8 devices, with the constants of the cluster and of a stack."""
    known = constants_for(open_cluster(cluster, 8), "bf16", stack=stack)
    problem = PlanProblem(open_model(model).at(seq), open_cluster(cluster, 8), batch, known.constants,
                          stack=known.software)  # fmt: skip
    space = PlanSpace.of(problem.model, problem.cluster, batch, seq, "standard", [read_condition(PLAIN)])
    (plan,) = search(space, problem, SearchOptions(top=1, policy_seconds=0.0)).plans
    return plan


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("model", "batch", "seq"), halved([("gpt2", 128, 1024), ("llama-3.1-8b", 128, 8192)]))
def test_newer_hardware_of_one_stack_is_never_slower(model: str, batch: int, seq: int) -> None:
    steps = {}
    for cluster in ("a100-80", "h100", "h200", "b200", "mi300x"):
        plan = best(model, cluster, batch, seq, DEFAULT_STACK)
        assert plan.priced is not None
        steps[cluster] = plan.step_s
        problem, axes = plan.priced.planned.problem, plan.axes
        layers = -(-problem.model.layers // axes.pp)
        host = problem.constant("step") + problem.constant("host") * layers
        assert plan.priced.beside.host == host
        assert waterfall(plan.priced)[-1].seconds == pytest.approx(host, rel=1e-9)
    assert steps["h200"] <= steps["h100"] <= steps["a100-80"]
    assert steps["b200"] <= steps["h100"]
    assert steps["mi300x"] > 0


def of_owner(known: PlanConstants, owner: str) -> dict[str, float]:
    return {name: value for name, value in known.constants.items() if BY_NAME[name].owner == owner}


def test_clusters_have_their_own_devices_and_one_stack() -> None:
    each = {name: constants_for(open_cluster(name), "bf16") for name in files("clusters")}
    assert len({json.dumps(of_owner(known, "stack")) for known in each.values()}) == 1
    a100, h100, h200, mi300x = (each[name] for name in ("a100-80", "h100", "h200", "mi300x"))
    assert of_owner(a100, "device") != of_owner(h100, "device")
    assert of_owner(h200, "device") == of_owner(h100, "device")
    assert of_owner(mi300x, "device") == {c.name: c.median for c in CONSTANTS if c.owner == "device"}
    assert h100.origins[0].endswith("with rows of H100 SXM 80 GB")
    assert "borrowed from H100 SXM 80 GB" in h200.origins[0]
    assert "priors, because no fit has rows of MI300X" in mi300x.origins[0]
    assert all(known.origins[1].endswith("the default") for known in each.values())
    for name, known in each.items():
        borrowed = bool(open_cluster(name).alike)
        assert borrowed == ("borrowed" in known.origins[0]), name
    gemm = NAMES.index("gemm")
    assert h200.known.logs[gemm, gemm] == pytest.approx(h100.known.logs[gemm, gemm] + 0.1**2)


def test_a_stack_is_that_of_a_fit_whole_and_independent() -> None:
    """`--stack` takes constants of the stack alone, with their spread, and the traits of its rows."""
    h100, other = (constants_for(open_cluster("h100"), "bf16", stack=name) for name in ("", "vtrain_multi"))
    assert of_owner(other, "device") == of_owner(h100, "device")
    fit = load_fit(files("fits")["vtrain_multi"])
    assert other.constants["launch"] == fit.constants["launch"] != h100.constants["launch"]
    stack = np.array([each.owner == "stack" for each in CONSTANTS])
    assert not other.known.logs[np.ix_(stack, ~stack)].any()
    assert np.linalg.eigvalsh(other.known.logs).min() > 0
    of_fit = ConstantSpread.of_fit(fit.constants, fit.triangle, "")
    assert (other.known.logs == of_fit.logs)[np.ix_(stack, stack)].all()


def test_a_fit_beside_a_cluster_brings_its_stack(tmp_path: Path) -> None:
    text = files("clusters")["ascend-910b"].read_text(encoding="utf-8")
    shutil.copyfile(files("fits")["mindspeed_rc2"], tmp_path / "own.fit.toml")
    path = tmp_path / "cluster.toml"
    path.write_text(text.replace('"mindspeed_rc2"', '"own.fit.toml"'), encoding="utf-8")
    own, named = (constants_for(cluster, "bf16") for cluster in (load_cluster(path), open_cluster("ascend-910b")))
    fit = load_fit(files("fits")["mindspeed_rc2"])
    assert own.constants["launch"] == fit.constants["launch"] != named.constants["launch"]
    given = constants_for(open_cluster("ascend-910b"), "bf16", files("fits")["mindspeed_rc2"])
    assert given.constants == own.constants
    assert (own.origins[1], named.origins[1]) == ("stack: mindspeed_rc2", f"stack: {DEFAULT_STACK}, the default")


def test_traits_of_a_stack_are_read_and_refused() -> None:
    fit = load_fit(files("fits")["vtrain_multi"])
    text = fit_text(fit).replace("\n[device]", "\n[software]\nfused = false\ngrad_bytes = 2\n\n[device]")
    text = text if fit.software == {} else fit_text(fit)
    read = parse_fit(Source("a.fit.toml", text))
    assert (read.software["fused"], read.software["grad_bytes"]) == (False, 2)
    assert fit_text(read) == text
    for old, new in (("fused = false", "fused = 3"), ("fused = false", "fuse = false"), ("grad_bytes = 2", "dp = 2")):
        with pytest.raises(DiagnosticError) as caught:
            parse_fit(Source("a.fit.toml", text.replace(old, new)))
        assert {finding.code for finding in caught.value.diagnostics} == {"S725"}


def test_a_stack_that_is_nowhere_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        constants_for(open_cluster("h100"), "bf16", stack="vtrain_mult")
    (finding,) = caught.value.diagnostics
    assert (finding.code, finding.help) == ("S709", "did you mean `vtrain_multi`?")


def test_a_search_says_whose_its_constants_are() -> None:
    arguments = ["plan", "gpt2", "mi300x", "-D", "devices=8", "--batch", "16x1024", "--require", PLAIN, "--top", "1"]
    run = CliRunner().invoke(main, [*arguments, "--stack", "vtrain_multi", "--draws", "off", "--json"])
    facts = json.loads(run.stdout)
    assert facts["origins"] == [
        "device and fabric: priors, because no fit has rows of MI300X 192 GB", "stack: vtrain_multi"
    ]  # fmt: skip
    fit = load_fit(files("fits")["vtrain_multi"])
    assert facts["constants"]["stack"]["launch"] == fit.constants["launch"]
    assert facts["constants"]["device"]["gemm"] == BY_NAME["gemm"].median
