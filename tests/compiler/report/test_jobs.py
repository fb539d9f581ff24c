"""Jobs beside written plans: what they ask a cluster for, the ranks of their nodes, and how they start the trainer."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import schedc
from schedc.cli import main
from schedc.ir.parallel import Parallel
from schedc.ir.plan import NO_PLAN, Topology
from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import PricedPlan, price_plan
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import open_choice
from schedc.planner.times.problem import PlanProblem
from schedc.report.compiled_job import ProgramHosts
from schedc.report.job_files import JOB_SUFFIXES, ClusterJob, write_job
from schedc.report.jobs import HostMap, job_text, no_job
from schedc.report.plan_folder import check_folder
from schedc.report.plans import remarks
from support.local_jobs import launch_line, scripts_of
from support.needs import needed
from support.sweeps import halved

GPT2 = PlanProblem(open_model("gpt2").at(1024), open_cluster("h100", 16), 32)
AXES = PlanAxes(1, 1, 4, 1, 1, 4, 1, 1, 8, "1f1b")
RUNS = {"schedc": None}


def of_yaml(text: str) -> Any:
    return needed("yaml").safe_load(text)


def priced(axes: PlanAxes = AXES, problem: PlanProblem = GPT2) -> PricedPlan:
    table = PartTable.of(problem, [axes.split])
    return price_plan(PlannedStep(problem, axes, open_choice(axes.schedule), table))


def test_ranks_lie_on_nodes_as_the_price_has_them() -> None:
    plan = priced()
    hosts = HostMap.of(plan)
    assert hosts == HostMap(nodes=2, per_node=8, domain=1, left=0)
    assert list(hosts.lines(plan)) == [
        "Ranks follow each other, as predicted: node n has the ranks 8 n to 8 n + 7.",
        "A rank is 4 pp + dp, by its places on the axes, which begin at 0.",
        "node 0: pp 0, dp 0  to  pp 1, dp 3",
        "node 1: pp 2, dp 0  to  pp 3, dp 3",
    ]
    small = priced(replace(AXES, pp=2), replace(GPT2, cluster=open_cluster("h100", 8)))
    assert HostMap.of(small) == HostMap(nodes=1, per_node=8, domain=1, left=0)


def test_spare_devices_are_left_out() -> None:
    cluster = open_cluster("gb200-nvl72", 144)
    plan = priced(replace(AXES, dp=32, microbatches=1, spare=8), replace(GPT2, cluster=cluster, sequences=32))
    hosts = HostMap.of(plan)
    assert hosts == HostMap(nodes=32, per_node=4, domain=16, left=2)
    said = list(hosts.lines(plan))
    assert said[-2:] == [
        "Nodes 0 to 15 share a domain of the network, and so do the next 16.",
        "Each domain has 2 further nodes, without ranks: leave them out.",
    ]
    assert sum(line.startswith("node ") for line in said) == 4
    assert "nodes 4 to 31: by the same formula" in said
    odd = replace(cluster, per_node=16)
    uneven = HostMap.of(replace(plan, planned=replace(plan.planned, problem=replace(GPT2, cluster=odd))))
    assert uneven == "128 ranks do not fill nodes of 16 devices evenly"


def test_the_fields_of_each_kind_of_job(tmp_path: Path) -> None:
    """Required fields and types are those of the TrainJob's API (v1alpha1) and of SkyPilot's task YAML."""
    plan = priced()
    texts = {kind: job_text(kind, plan, "01", RUNS) or "" for kind in JOB_SUFFIXES}
    for text in texts.values():
        assert text.index("schedc check 01.sched") < text.index("schedc compile 01.sched") < text.rindex("torchrun")
    (tmp_path / "01.sbatch").write_text(texts["slurm"])
    subprocess.run(["bash", "-n", str(tmp_path / "01.sbatch")], check=True)
    asked = dict(
        line[10:].split("=") for line in texts["slurm"].splitlines() if line.startswith("#SBATCH --") and "=" in line
    )
    assert asked == {
        "job-name": "train-gpt2-01", "partition": "SET_PARTITION", "nodes": "2", "ntasks-per-node": "1",
        "gpus-per-node": "8",
    }  # fmt: skip
    sky, trainjob = of_yaml(texts["skypilot"]), of_yaml(texts["kubeflow"])
    assert set(sky) == {"name", "workdir", "num_nodes", "resources", "run"}
    assert (sky["num_nodes"], sky["resources"]) == (2, {"accelerators": "H100:8", "image_id": "docker:SET_IMAGE"})
    assert (trainjob["apiVersion"], trainjob["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert trainjob["metadata"] == {"name": "train-gpt2-01"}
    assert trainjob["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = trainjob["spec"]["trainer"]
    assert set(trainer) == {"image", "numNodes", "numProcPerNode", "resourcesPerNode", "env", "command"}
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == ("SET_IMAGE", 2, 8)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}


def test_devices_have_the_names_of_their_cluster() -> None:
    for cluster, sky, resource in (
        ("mi300x", "MI300X:8", "amd.com/gpu"),
        ("ascend-910b", "SET_ACCELERATOR:8", "huawei.com/Ascend910"),
        ("gb200-nvl72", "GB200:4", "nvidia.com/gpu"),
    ):
        plan = priced(problem=replace(GPT2, cluster=open_cluster(cluster, 16)))
        assert of_yaml(job_text("skypilot", plan, "01", RUNS) or "")["resources"]["accelerators"] == sky
        limits = of_yaml(job_text("kubeflow", plan, "01", RUNS) or "")["spec"]["trainer"]["resourcesPerNode"]
        assert list(limits["limits"]) == [resource]


def test_a_plan_that_the_runtime_does_not_run_has_no_job() -> None:
    plan, refused = priced(replace(AXES, tp=2, dp=2)), {"schedc": "the plan says tp 2"}
    assert no_job(plan, refused) == "schedc does not run it: the plan says tp 2"
    assert "deals no tokens to cp 2" in str(no_job(priced(replace(AXES, cp=2, dp=2)), {"schedc": None}))
    assert job_text("skypilot", plan, "01", refused) is None


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("kind", halved(JOB_SUFFIXES))
def test_a_job_checks_and_compiles_its_plan_and_starts_the_trainer(kind: str, tmp_path: Path) -> None:
    plan, folder, script = priced(), tmp_path / "plans", tmp_path / "script"
    folder.mkdir()
    (folder / "01.sched").write_text(plan.plan_text)
    (folder / "01.costs.toml").write_text(plan.cost_text)
    text = job_text(kind, plan, "01", RUNS) or ""
    script.write_text(text if kind == "slurm" else scripts_of(of_yaml(text)))
    environment = {
        "PLANS": str(folder),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "a\nb",
    }
    words = launch_line(script, folder, environment)
    start = words.index("-m")
    assert words[start : start + 3] == ["-m", "schedc_runtime.commands.run", "--program"]
    assert Path(words[start + 3]).exists()
    assert words[start + 4 :] == ["--cost-file", "01.costs.toml"]
    node, meet = {"slurm": ("0", "127.0.0.1"), "skypilot": ("1", "a")}.get(kind, ("", ""))
    ranks = ["--nnodes", "2", "--nproc-per-node", "8", "--node-rank", node, "--master-addr", meet]
    assert words[:start] == ([*ranks, "--master-port", "29500"] if node else [])
    if kind == "kubeflow":
        with pytest.raises(AssertionError, match="set PLANS to the folder"):
            launch_line(script, folder, {"PLANS": ""})
    if kind != "slurm":
        return
    own = launch_line(script, folder, environment | {"TRAIN": "mine.py --lr 1"})
    assert own[start : start + 4] == ["mine.py", "--lr", "1", "--program"]
    (folder / "01.sched").rename(tmp_path / "gone.sched")
    with pytest.raises(AssertionError, match=r"start the job in the folder with 01\.sched"):
        launch_line(script, folder, environment)
    (folder / "01.sched").write_text(plan.plan_text.replace("memory", "memori"))
    with pytest.raises(AssertionError, match="S0"):
        launch_line(script, folder, environment)


def test_a_search_writes_jobs_beside_its_plans(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    search = ["plan", "gpt2", "h100", "-D", "devices=16", "--batch", "32x1024", "--draws", "off", "--top", "9"]
    search += ["--require", "pp == 4 and microbatch == 1 and zero == 1 and tp <= 2 and cp == 1 and recompute == none"]
    result = CliRunner().invoke(
        main, [*search, "--require", "schedule == 1f1b", "--json", "-o", str(folder), "--jobs", "sky"]
    )
    assert "note: `--jobs sky` is now `--job skypilot`" in result.stderr
    assert result.exit_code == 0, result.output
    check_folder(folder, forced=True)
    facts = json.loads(result.stdout)
    plans = facts["plans"]
    assert any(line.startswith("no job for ") and "has no styles for tp 2" in line for line in remarks(facts))
    jobs = {plan["axes"]["tp"]: plan["job"] for plan in plans}
    assert jobs[1]["reason"] is None
    assert (folder / jobs[1]["file"]).read_text().endswith("costs.toml\n")
    assert jobs[2]["file"] is None
    assert jobs[2]["reason"].startswith("the job's trainer has no styles for tp 2")
    assert len([*folder.glob("*.sky.yaml")]) == sum(
        plan["job"]["file"] is not None for plan in json.loads(result.stdout)["plans"]
    )


def test_jobs_need_a_folder() -> None:
    result = CliRunner().invoke(main, ["plan", "gpt2", "h100", "--batch", "32x1024", "--job", "skypilot"])
    assert result.exit_code == 2
    assert "--job writes beside the plan files: add -o FOLDER" in result.output


@pytest.mark.parametrize("kind", JOB_SUFFIXES)
def test_a_compiled_program_has_a_job_that_asks_the_doctor_first(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    asked = ["compile", "1f1b", "-D", "P=16", "-D", "M=16", "--job", kind, "-o", str(folder)]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 0, result.output
    path = folder / f"job{JOB_SUFFIXES[kind]}"
    text = path.read_text()
    assert "node n has the ranks 8 n to 8 n + 7" in text
    assert text.index("-m schedc doctor program.json") < text.index("TRAIN:?set TRAIN to your trainer")
    script = tmp_path / "script"
    script.write_text(text if kind == "slurm" else scripts_of(of_yaml(text)))
    environment = {"PROGRAM": str(folder), "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1",
                   "SKYPILOT_NODE_IPS": "a\nb", "TRAIN": "mine.py"}  # fmt: skip
    assert launch_line(script, folder, environment)[-3:] == ["mine.py", "--program", "program.json"]
    with pytest.raises(AssertionError, match="set TRAIN to your trainer"):
        launch_line(script, folder, {**environment, "TRAIN": ""})


def test_hosts_of_a_program_follow_from_its_plan() -> None:
    program = schedc.compile("1f1b", P=4, M=8)
    assert ProgramHosts.of(program, NO_PLAN, 1) == ProgramHosts(4, 1, 4)
    assert ProgramHosts.of(program, NO_PLAN, 3) == "12 ranks do not fill nodes of 8 devices evenly"
    assert ProgramHosts.of(program, replace(NO_PLAN, topology=Topology(2, 4)), 1) == ProgramHosts(4, 8, 4)
    spread = Parallel(dp=4, devices=16, node=2)
    hosts = ProgramHosts.of(program, replace(NO_PLAN, parallel=spread), 1)
    assert hosts == ProgramHosts(4, 4, 2)
    assert "A rank is 4 x its pipeline rank + its peer" in hosts.comment()


def test_names_of_jobs_are_those_of_every_launcher() -> None:
    job = ClusterJob("mein Modell \u00e4'" + "x" * 60 + "-01", 1, 8, (), "", "PLANS", lambda _torchrun: ())
    name = "train-" + "x" * 45 + "-01"
    assert job.dns_name == name
    assert f"#SBATCH --job-name={name}\n" in write_job("slurm", job)
    assert {of_yaml(write_job("skypilot", job))["name"], of_yaml(write_job("kubeflow", job))["metadata"]["name"]} == {
        name
    }
    assert replace(job, name="\u6a21").dns_name == "train"
