"""Layouts by number of layers: as even as possible, or made even by paddings at chosen places."""

from __future__ import annotations

from collections.abc import Sequence

from schedc.plan.layout.parts import DECODER, LARGEST, Layout, Model, ModelPart, PartKind, refusal


def even(model: Model, stages: int) -> Layout:
    """A layout with equally many layers per stage, in order; the first stages take one more of the remainder each.

    Predictions and head are in the last stage. Raises `DiagnosticError` (S143).
    """
    _check_stages(stages)
    less, more = divmod(model.layers, stages)
    layers = iter(model.decoder)
    return _with_ends(model, [[next(layers) for _ in range(less + (stage < more))] for stage in range(stages)])


def padded(model: Model, stages: int, pad: int, at: str | Sequence[int] = "last") -> Layout:
    """A layout with equally many places per stage, ``pad`` of them empty. Layers keep their numbers.

    at: where the empty places are: "last" or "first" of all, or their numbers from 0. `balance` finds the best places.
    Raises `DiagnosticError` (S143) where the stages do not divide the places.
    """
    width = places_per_stage(model, stages, pad)
    empty = positions_at(model.layers + pad, pad, at)
    layers = iter(model.decoder)
    row = [ModelPart(PartKind.NOOP) if place in empty else next(layers) for place in range(model.layers + pad)]
    return _with_ends(model, [row[stage * width : (stage + 1) * width] for stage in range(stages)])


def places_per_stage(model: Model, stages: int, pad: int) -> int:
    """Decoder layers and paddings per stage. Raises `DiagnosticError` (S143) where the stages do not divide them."""
    _check_stages(stages)
    places = model.layers + pad
    if pad < 0 or places > LARGEST:
        raise refusal(f"{pad} paddings", f"from 0 to {LARGEST - model.layers} with {model.layers} layers")
    if places % stages:
        fitting = -model.layers % stages
        raise refusal(
            f"{model.layers} layers and {pad} paddings are {places} places, which {stages} stages cannot share equally",
            f"{fitting} paddings make {(model.layers + fitting) // stages} places per stage",
        )
    return places // stages


def positions_at(places: int, pad: int, at: str | Sequence[int]) -> frozenset[int]:
    """The numbers of the empty places among ``places``; ``at`` as for `padded`. Raises `DiagnosticError` (S143)."""
    if at == "last":
        return frozenset(range(places - pad, places))
    if at == "first":
        return frozenset(range(pad))
    if isinstance(at, str):
        raise refusal(f"no places are called `{at}`", "last, first, or a list of numbers")
    empty = frozenset(at)
    if len(empty) != len(at) or len(empty) != pad:
        raise refusal(f"{pad} paddings at {len(empty)} different places", f"give {pad} different numbers")
    outside = sorted(place for place in empty if not 0 <= place < places)
    if outside:
        raise refusal(f"a padding at place {outside[0]} of {places}", f"places are 0 to {places - 1}")
    return empty


def _with_ends(model: Model, stages: list[list[ModelPart]]) -> Layout:
    """The layout of the decoder's stages with embedding, predictions and head added."""
    heads = model.heads(len(stages))
    first_head = min(heads)
    if first_head < 0 or any(part.kind in DECODER for held in stages[first_head + 1 :] for part in held):
        message = f"{model.losses} losses in stages of their own, and decoder layers in the last {model.losses - 1}"
        raise refusal(message, "lay them out with --auto, or write the layout")
    stages[0][:0] = model.entry
    stages[first_head] += model.predictions
    for stage, head in heads.items():
        stages[stage].append(head)
    return Layout(tuple(map(tuple, stages)))


def _check_stages(stages: int) -> None:
    if not 1 <= stages <= LARGEST:
        raise refusal(f"{stages} stages", f"from 1 to {LARGEST}")
