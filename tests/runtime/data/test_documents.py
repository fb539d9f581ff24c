"""Packed rows in models: masks, positions and targets, gradients of documents alone, and models that take no documents.

A document alone is a row without neighbours. Packed rows have to give its gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import schedc
from schedc.plan import Plan
from schedc_runtime import Cut, Loss, Pipeline
from schedc_runtime.data import document_mask, document_positions, next_tokens, packed_inputs, transformers_inputs
from schedc_runtime.errors import PartitionError
from schedc_runtime.models.gpt import GPT, GPTConfig
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer, multi_token_loss
from schedc_runtime.moe.router import RouterConfig
from support import row_cases
from support.needs import needed
from support.sweeps import halved

pytestmark = pytest.mark.slow

VOCAB, TOKENS, EQUAL = 32, 16, 1e-13
ROWS = [[9, 7], [5, 6, 4], [16], [3, 1, 1, 8]]
"""Lengths of the documents of each row. Two rows are not full."""


def packed() -> tuple[list[list[Tensor]], Tensor, Tensor, Tensor]:
    """Documents by row; tokens, documents and targets of the rows."""
    draw = torch.Generator().manual_seed(2)
    texts = [[torch.randint(0, VOCAB, (size,), generator=draw) for size in row] for row in ROWS]
    filled = torch.tensor([sum(row) for row in ROWS])
    tokens = torch.stack([functional.pad(torch.cat(row), (0, TOKENS - len(torch.cat(row)))) for row in texts])
    ends = [torch.tensor(row).cumsum(0) for row in ROWS]
    documents = torch.stack([torch.searchsorted(end, torch.arange(TOKENS), right=True) for end in ends]).int()
    return texts, tokens, documents, next_tokens(tokens, documents, filled)


def summed(output: Any, targets: Tensor) -> Loss:
    """Cross entropy as a sum over tokens with a target: of logits, or of what Transformers returns."""
    return row_cases.summed(getattr(output, "logits", output), targets)


def twice(output: tuple[Tensor, Tensor], targets: Tensor) -> Loss:
    """Both predictions of a model with multi-token prediction, summed over tokens."""
    further = functional.pad(output[1], (0, 0, 0, 1))
    after = functional.pad(torch.where(targets[:, :-1] == -100, -100, targets[:, 1:]), (0, 1), value=-100)
    first = summed(output[0], targets)
    return Loss(first.sum + summed(further, after).sum, first.count)


def difference(
    make: Callable[[], nn.Module], inputs: Any, plan: Plan | None = None, loss: Any = summed, schedule: str = "zbh1"
) -> float:
    """The largest difference of gradients of packed rows in a pipeline from those of each document alone."""
    texts, tokens, documents, targets = packed()
    batch, program = inputs(tokens, documents), schedc.compile(schedule, P=2, M=4)
    pipe = Pipeline(make(), program, loss_fn=loss, in_process=True, plan=plan, example=batch)
    pipe.step(batch, targets)
    grads = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    pipe.close()
    model = make()
    alone = []
    for text in (text[None] for row in texts for text in row if len(text) > 1):  # one token alone has no target
        alone.append(loss(model(text), functional.pad(text[:, 1:], (0, 1), value=-100)))
    (torch.stack([each.sum for each in alone]).sum() / sum(int(each.count) for each in alone)).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return row_cases.farthest(grads, expected)


def moe(multi_token: bool = False) -> MoETransformer:
    """Without an auxiliary loss, which depends on the rows of a microbatch."""
    torch.manual_seed(0)
    config = MoEConfig(
        vocab=VOCAB, width=16, heads=2, dense_blocks=1, moe_blocks=1 if multi_token else 3, inner=24, expert_inner=6,
        routing=RouterConfig(8, 3), query_rank=8, key_value_rank=4, plain=4, rotary=4, value=4,
        multi_token=multi_token,
    )  # fmt: skip
    return MoETransformer(config).double()


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=VOCAB, width=16, heads=2, blocks=2, context=TOKENS)).double()


def test_masks_positions_and_targets_of_documents() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3]], dtype=torch.int32)
    assert document_positions(documents).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    expected = [[i >= j and documents[0, i] == documents[0, j] for j in range(8)] for i in range(8)]
    assert torch.equal(document_mask(documents)[0, 0], torch.tensor(expected))
    tokens = torch.arange(8)[None] + 10
    assert next_tokens(tokens, documents, torch.tensor([6])).tolist() == [[11, 12, -100, 14, *[-100] * 4]]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("make", "plan", "loss", "schedule"),
    halved(
        [
            pytest.param(gpt, None, summed, "zbh1", id="gpt"),
            pytest.param(moe, Plan(overlap=True), summed, "dualpipev", id="moe in segments"),
            pytest.param(lambda: moe(multi_token=True), None, twice, "zbh1", id="moe, two predictions"),
        ]
    ),
)
def test_packed_rows_have_the_gradients_of_their_documents(
    make: Callable[[], nn.Module], plan: Plan | None, loss: Any, schedule: str
) -> None:
    assert difference(make, packed_inputs, plan, loss, schedule) < EQUAL


def test_two_predictions_end_with_the_document() -> None:
    """The token after the next one is that of the next document where a document ends. It is not predicted."""
    _, tokens, documents, targets = packed()
    logits, further = moe(multi_token=True)(tokens, documents)
    whole = multi_token_loss(1.0)((logits, further), targets) - row_cases.mean(logits, targets)
    pairs = [(row, place) for row in range(len(ROWS)) for place in range(TOKENS - 2)
             if documents[row, place] == documents[row, place + 2] and targets[row, place + 1] != -100]  # fmt: skip
    expected = [functional.cross_entropy(further[row, place], tokens[row, place + 2]) for row, place in pairs]
    torch.testing.assert_close(whole, torch.stack(expected).mean())


@pytest.mark.parametrize(("attention", "limit"), [("sdpa", EQUAL), ("eager", 1e-6)])  # eager's softmax is in float32
def test_models_of_transformers_keep_documents_apart(attention: str, limit: float) -> None:
    assert difference(lambda: llama(attention), transformers_inputs, schedule="1f1b") < limit


def llama(attention: str) -> Any:
    transformers = needed("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=TOKENS, tie_word_embeddings=False, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


# Refusals.


class Ignores(nn.Module):
    """Takes any keyword, as models of Transformers do, and reads none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCAB, 8), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, tokens: Tensor, **others: Any) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Reads(Ignores):
    """Reads documents from its keywords."""

    def forward(self, tokens: Tensor, **others: Any) -> Tensor:
        return super().forward(tokens) * document_positions(others["documents"]).unsqueeze(-1)


class OnlyTokens(Ignores):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


def stepped(model: nn.Module, **options: Any) -> Tensor:
    _, tokens, documents, targets = packed()
    pipe = Pipeline(
        model, schedc.compile("1f1b", P=2, M=4), loss_fn=lambda x, _: x.square().mean(), in_process=True, **options
    )
    return pipe.step(packed_inputs(tokens, documents), targets)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Ignores, r"Ignores was given \['documents'\], but takes \['tokens'\]"),
        (OnlyTokens, r"OnlyTokens was given \['documents'\], but takes \['tokens'\]"),
    ],
)
def test_models_without_documents_are_refused_by_name(model: type[nn.Module], says: str) -> None:
    with pytest.raises(PartitionError, match=says):
        stepped(model())


def test_a_model_may_read_documents_from_its_keywords() -> None:
    loss = stepped(Reads(), cut=Cut(inputs=["tokens", "documents"]))
    assert torch.isfinite(loss)
    assert loss > 0


def test_without_documents_a_model_is_as_before() -> None:
    tokens, one_document = torch.arange(16).reshape(2, 8), torch.zeros(2, 8, dtype=torch.int32)
    for model in (gpt(), moe()):
        torch.testing.assert_close(model(tokens), model(tokens, one_document), rtol=1e-12, atol=1e-14)


def test_rearranged_rows_have_the_gradients_of_their_documents_alone() -> None:
    _, failed, figures = row_cases.losses()
    assert failed == []
    assert figures["means of means"] > 1e-3  # another denominator would have been seen
