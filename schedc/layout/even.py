"""Layouts by number of layers: as even as they go, or made even by paddings at given places."""

from __future__ import annotations

from collections.abc import Sequence

from schedc.layout.parts import LARGEST, Layout, Model, ModelPart, PartKind, refusal


def even(model: Model, stages: int) -> Layout:
    """Layers in order, as many in each stage as in the next; the first stages take what is left over.

    Predictions and head are in the last stage, as where nothing else is asked for. Raises `DiagnosticError` (S143).
    """
    _check_stages(stages)
    less, more = divmod(model.layers, stages)
    layers = iter(model.decoder)
    return _with_ends(model, [[next(layers) for _ in range(less + (stage < more))] for stage in range(stages)])


def padded(model: Model, stages: int, pad: int, at: str | Sequence[int] = "last") -> Layout:
    """Stages of equally many places, ``pad`` of them empty.

    at: "last" or "first" for the end or the beginning of the row of places, or the numbers of the empty places, from
    0. For paddings where they balance best, see `schedc.layout.balance`. The layers keep their numbers.
    Raises `DiagnosticError` (S143) where places and stages do not go together.
    """
    width = places_per_stage(model, stages, pad)
    empty = positions_at(model.layers + pad, pad, at)
    layers = iter(model.decoder)
    row = [ModelPart(PartKind.NOOP) if place in empty else next(layers) for place in range(model.layers + pad)]
    return _with_ends(model, [row[stage * width : (stage + 1) * width] for stage in range(stages)])


def places_per_stage(model: Model, stages: int, pad: int) -> int:
    """How many decoder layers and paddings each stage has; raises `DiagnosticError` (S143) if they do not divide."""
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
    """The numbers of the empty ones among ``places``; raises `DiagnosticError` (S143)."""
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
    """The decoder's stages with embedding, predictions and head."""
    stages[0].insert(0, ModelPart(PartKind.EMBEDDING))
    stages[-1] += [*model.predictions, ModelPart(PartKind.HEAD)]
    return Layout(tuple(map(tuple, stages)))


def _check_stages(stages: int) -> None:
    if not 1 <= stages <= LARGEST:
        raise refusal(f"{stages} stages", f"from 1 to {LARGEST}")
