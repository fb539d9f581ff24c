"""The MoE transformer in pipelines: bits of the reference, gradients of plain autograd, the example, the document."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import schedc
from schedc.plan import Method, Plan
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer, multi_token_loss
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.parity.reference import reference_step
from schedc_runtime.pipeline.agree.batch import split
from support.moe_layers import set_loss_scale, update_router_biases
from support.paths import ROOT
from support.sweeps import halved, in_sweeps
from support.warm_command import run_torchrun

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


CONFIG = MoEConfig(
    vocab=32, width=16, heads=2, dense_blocks=1, moe_blocks=3, inner=24, expert_inner=6,
    routing=RouterConfig(8, 3, scores="sigmoid", scale=2.5, groups=4, limit=2, biased=True, balance=0.1),
    query_rank=8, key_value_rank=4, plain=4, rotary=4, value=4, multi_token=True,
)  # fmt: skip


def transformer() -> MoETransformer:
    torch.manual_seed(0)
    return MoETransformer(CONFIG).double()


@pytest.mark.sweep
@pytest.mark.parametrize(("schedule", "ranks"), halved([("1f1b", 2), ("zbv", 2)]))
def test_a_pipeline_trains_the_transformer_with_the_bits_of_the_reference(schedule: str, ranks: int) -> None:
    """Whole and split backwards, multi-token prediction, auxiliary loss: bit for bit, and close to plain autograd."""
    program = schedc.compile(schedule, P=ranks, M=4)
    model, reference = transformer(), transformer()
    ids = torch.randint(0, 32, (8, 7), generator=torch.Generator().manual_seed(2))
    batch, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    loss_fn = multi_token_loss()
    pipe = Pipeline(model, program, loss_fn=loss_fn, in_process=True)
    set_loss_scale(model, 0.25)
    cpu = torch.device("cpu")
    parts = [((part,), {}) for part in split(batch, 4, cpu)]
    expected = reference_step(pipe.partition, program, parts, split(targets, 4, cpu), loss_fn)
    loss = pipe.step(batch, targets)
    assert torch.equal(loss, expected.loss)
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, expected.grads[name]), name

    set_loss_scale(reference, 0.25)
    for x, y in zip(batch.chunk(4), targets.chunk(4), strict=True):
        (loss_fn(reference(x), y) * 0.25).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(expected.grads[name], parameter.grad, rtol=1e-10, atol=1e-13, msg=name)

    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    assert [layer.statistics.choices for layer in layers] == [8 * 6 * 3] * 3 + [8 * 5 * 3]
    update_router_biases(model)
    assert all(layer.router.bias.abs().max() == 1e-3 for layer in layers)  # type: ignore[union-attr]
    assert layers[0].statistics.choices == 0
    pipe.evaluate(batch, targets)
    assert layers[0].statistics.choices == 0
    pipe.close()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("schedule", "method"), halved([("1f1b", Method.ALLGATHER), ("dualpipev", Method.HIERARCHICAL)])
)
def test_pipelines_that_share_experts_have_the_gradients_of_plain_autograd(schedule: str, method: Method) -> None:
    """Two ranks share the experts; microbatch m of both is one for the auxiliary loss, the main loss is their mean."""
    ids = torch.randint(0, 32, (16, 7), generator=torch.Generator().manual_seed(3))
    batch, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    loss_fn = multi_token_loss()
    pipe = Pipeline(
        transformer(), schedc.compile(schedule, P=2, M=4), loss_fn=loss_fn, mesh=Mesh(2, 2, per_node=1),
        plan=Plan(method=method, overlap=True), in_process=True,
    )  # fmt: skip
    loss = pipe.step(batch, targets)
    reference = transformer()
    set_loss_scale(reference, 0.25)
    expected = torch.zeros((), dtype=torch.float64)
    for m in range(4):
        rows = torch.tensor([2 * m, 2 * m + 1, 8 + 2 * m, 9 + 2 * m])
        part = loss_fn(reference(batch[rows]), targets[rows]) / 4
        part.backward()
        expected += part.detach()
    torch.testing.assert_close(loss, expected)
    grads: dict[str, list[Tensor | None]] = {}
    for name, parameter in pipe.named_parameters():
        grads.setdefault(name, []).append(parameter.grad)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        parts = parameter.grad.chunk(2) if name.endswith((".gate_up", "experts.down")) else [parameter.grad] * 2
        for grad, part in zip(grads[name], parts, strict=True):
            torch.testing.assert_close(grad, part, rtol=1e-10, atol=1e-13, msg=name)
    pipe.close()


def test_tied_multi_token_embedding_and_plain_logits() -> None:
    tied = MoETransformer(replace(CONFIG, tied=True))
    assert tied.multi_token is not None
    assert tied.multi_token.embedding.weight is tied.embedding.weight
    single = MoETransformer(replace(CONFIG, multi_token=False, shared=0))
    assert single(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 32)


@in_sweeps(
    "test_the_lines_of_the_document_run",
    "runtime/pipeline/test_embedding.py::test_the_example_under_torchrun_which_restarts_it_once",
)
@pytest.mark.processes
def test_the_example_trains_on_two_processes_and_saves_the_whole_model(tmp_path: Path) -> None:
    saved = tmp_path / "model.pt"
    sizes = {"microbatches": 2, "blocks": 2, "experts": 8, "top": 2, "tokens": 8, "steps": 10, "learning-rate": 0.02}
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    expert = ["--experts-over", "2", "--per-node", "1", "--method", "hierarchical", "--capacity", "1"]
    script = ["examples/05_train_moe.py", "--schedule", "1f1b", *expert, *options, "--save", str(saved)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = run_torchrun(["--nproc-per-node", "2", *script], ROOT, environment)
    assert done.returncode == 0, done.stderr
    shown = re.findall(
        r"^step (\d+): loss (\d+\.\d+), imbalance \d\.\d+, dropped (\d+\.\d)%$", done.stdout, re.MULTILINE
    )
    assert [int(step) for step, _, _ in shown] == [1, 10]
    assert float(shown[1][1]) < float(shown[0][1])
    assert float(shown[0][2]) > 0.0
    state = torch.load(saved, weights_only=True)
    assert state["blocks.1.mlp.experts.gate_up"].shape == (8, 64, 32)
    assert len(state["blocks.1.mlp.experts.down"].flatten(1).unique(dim=0)) == 8


def test_the_lines_of_the_document_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "guide" / "experts.md").read_text(encoding="utf-8")
    training, recording, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(training, names)
    assert torch.isfinite(names["loss"])
    names |= {"batch": names["tokens"][:, :-1], "targets": names["tokens"][:, 1:]}
    exec(recording, names)
    assert (tmp_path / "routing.npz").is_file()
    state = names["pipe"].full_state_dict()
    assert state["blocks.1.mlp.experts.down"].shape == (32, 16, 64)
    names["pipe"].close()
