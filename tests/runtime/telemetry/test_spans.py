"""Steps as spans of OpenTelemetry: one for each step of a rank, one inside per instruction, and the bits stay."""

from __future__ import annotations

import pytest
import torch

from schedc.compiler import compile as compile_schedule
from schedc_runtime import Pipeline, watch_speed
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.execute.instruction_names import instruction_label
from schedc_runtime.models.gpt import next_token_loss
from support.needs import needs
from support.runtime_cases import model_for, tokens

pytestmark = needs("opentelemetry")


def trained(
    telemetry: object = None, *, watched: bool = False, trace: bool = False
) -> tuple[Pipeline, list[torch.Tensor]]:
    """A pipeline after three steps on two ranks of this process, and its gradients."""
    program = compile_schedule("zbv", P=2, M=4)
    pipe = Pipeline(model_for(program), program, loss_fn=next_token_loss, in_process=True, telemetry=telemetry)
    if watched:
        watch_speed(pipe, print)
    batch = tokens(4)
    for _ in range(3):
        pipe.step(*batch, trace=trace)
    return pipe, [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"watched": True}, {"trace": True}], ids=["alone", "watched", "traced"])
def test_each_instruction_of_each_step_has_a_span_inside_its_step(how: dict[str, bool]) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    pipe, gradients = trained(provider.get_tracer("test"), **how)
    spans = exporter.get_finished_spans()
    steps = [span for span in spans if span.name == "step"]
    assert [(span.attributes["schedc.step"], span.attributes["schedc.rank"]) for span in steps] == [
        (step, rank) for step in (1, 2, 3) for rank in (0, 1)
    ]
    for step in steps:
        inside = [span for span in spans if span.parent and span.parent.span_id == step.context.span_id]
        rank = step.attributes["schedc.rank"]
        first, last = pipe.program.rank_start[rank : rank + 2]
        named = [label for span in inside for label in span.name.split(" + ")]
        assert named == [instruction_label(pipe.program, row) for row in range(first, last)]
        ends = [step.start_time, *(time for span in inside for time in (span.start_time, span.end_time)), step.end_time]
        assert ends == sorted(ends)
        if "trace" not in how:
            assert [span.start_time for span in inside] == [step.start_time, *(span.end_time for span in inside[:-1])]
        assert step.attributes["schedc.schedule"] == "zbv"
    _, alone = trained()
    assert all(map(torch.equal, gradients, alone))


def test_what_is_no_tracer_is_refused() -> None:
    with pytest.raises(RuntimeFault, match="no tracer of OpenTelemetry"):
        trained("http://collector")
