"""Brings images back to ranks whose node was lost, from the keepers of the nodes that hold copies.

A state can be used if for each of its ranks some node holds the image, of one attempt. A rank's own images say which
states it has, where they are left; copies count for ranks that have lost theirs. Names that several nodes hold are
holes of a copy. They come from the image of another rank.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.keeper.images import TENSORS, Image, ImageHeader, parts_besides
from schedc_runtime.keeper.messages import SECONDS, answer_of, receive_bytes, send_head
from schedc_runtime.keeper.places import Places
from schedc_runtime.saved.plain import json_of
from schedc_runtime.saved.safetensors import FileSpan, checked_spans

Address = tuple[str, int]


class HeldImage(NamedTuple):
    """An image of a rank on some node, as JSON. header: hexadecimal. size: bytes of the file.

    attempt, world: as its description says. holes: whether tensors are left out.
    """

    rank: int
    header: str
    size: int
    attempt: str
    world: int
    holes: bool

    @property
    def said(self) -> ImageHeader:
        header = ImageHeader.unpacked(bytes.fromhex(self.header))
        assert header is not None
        return header


class LostState(NamedTuple):
    """The newest state that nodes hold together. holders: by rank [(node, image)], those without holes first."""

    step: int
    attempt: str
    holders: dict[int, list[tuple[int, HeldImage]]]


def held_images(places: Places) -> list[HeldImage]:
    """All valid images on this node."""
    held = []
    for rank in places.ranks():
        for image in places.images(rank):
            header = image.header()
            said = None if header is None else image.description(header)
            if header is not None and said is not None:
                holes = header.copy and bool(said.get("elsewhere"))
                facts = said["attempt"], said["run"]["world"], holes
                held.append(HeldImage(rank, header.packed().hex(), image.size, *facts))
            image.close()
    return held


def newest_state(nodes: Sequence[Iterable[HeldImage]], world: int, allowed: int | None = None) -> LostState | None:
    """The newest state of ``world`` ranks of which some node holds each image. nodes: what each of them holds.

    allowed: the newest step that may be used; None for any.
    """
    by_state: defaultdict[tuple[int, str], dict[int, list[tuple[int, HeldImage]]]] = defaultdict(dict)
    everything = [(node, image) for node, images in enumerate(nodes) for image in images if image.world == world]
    left = {image.rank for _, image in everything if not image.said.copy}
    for _, image in everything:
        if not image.said.copy or image.rank not in left:
            by_state[image.said.step, image.attempt].setdefault(image.rank, [])
    for node, image in everything:
        state = by_state.get((image.said.step, image.attempt), {})
        if image.rank in state:
            state[image.rank].append((node, image))
    whole = [
        which for which, held in by_state.items() if len(held) == world and (allowed is None or which[0] <= allowed)
    ]
    if not whole:
        return None
    newest = max(whole)
    holders = {rank: sorted(held, key=lambda each: each[1].holes) for rank, held in by_state[newest].items()}
    return LostState(*newest, holders)


class LostImages:
    """What a rank needs to get its image of a state back. addresses: [nodes] of keepers. node: that of this rank."""

    def __init__(self, state: LostState, addresses: Sequence[Address], token: str, node: int) -> None:
        self._state, self._addresses, self._token, self._node = state, addresses, token, node
        self.bytes = 0
        """Bytes that came from other nodes."""

    def is_here(self, rank: int) -> bool:
        """Whether the node has the image as the rank itself has written it."""
        return any(node == self._node and not image.said.copy for node, image in self._state.holders[rank])

    def bring(self, rank: int, images: Sequence[Image], room: Callable[[int, int], Image]) -> None:
        """Get the image of ``rank`` into one of its two images, open in ``images``.

        room: fn(number, bytes) -> the image, which is empty and has that room. Raises `RuntimeFault` and `OSError`.
        """
        node, held = min(self._state.holders[rank], key=lambda each: (each[0] != self._node, each[1].holes))
        header = held.said
        said = [image.header() for image in images]
        originals = [None if own is None else own.original for own in said]
        if header.original in originals:
            image = images[originals.index(header.original)]
        else:
            steps = [-1 if own is None else own.step for own in said]
            image = room(steps.index(min(steps)), held.size)
            image.clear()
            parts = [(TENSORS, header.tensors)]
            if held.holes:
                description, spans = self._described(node, held)
                parts = parts_besides(spans, set(description["elsewhere"]), header.tensors)
            self._read(node, held, [*parts, (TENSORS + header.tensors, header.description)], image.write)
        if held.holes:
            image.put(header._replace(copy=True))
            self._fill(image, header)
        image.put(header.original)

    def _fill(self, image: Image, header: ImageHeader) -> None:
        """Fill the holes of an image from those of other ranks."""
        said = image.description(header)
        if said is None:
            raise RuntimeFault("the image has changed")
        own, missing = checked_spans(image.read, TENSORS, header.tensors, image.path), set(said["elsewhere"])
        wanted = {box: own[key] for box, key in _keys(said).items() if key in missing}
        for holders in self._state.holders.values():
            if not wanted:
                return
            node, held = holders[0]
            other, spans = self._described(node, held)
            filled = _keys(other, without=set(other.get("elsewhere", ())) if held.holes else set())
            for box in [box for box in wanted if box in filled]:
                target, source = wanted.pop(box), spans[filled[box]]
                if (target.dtype, target.shape) != (source.dtype, source.shape):
                    raise RuntimeFault(f"ranks hold `{box[0]}` with other types")
                put = partial(_shifted, image, target.begin - source.begin)
                self._read(node, held, [(source.begin, source.end - source.begin)], put)
        if wanted:
            raise RuntimeFault(f"no node holds `{next(iter(wanted))[0]}` of this rank any more")

    def _described(self, node: int, held: HeldImage) -> tuple[dict[str, Any], dict[str, FileSpan]]:
        """The description of an image, and where its tensors lie."""
        header = held.said

        def read(begin: int, length: int) -> bytes:
            content = bytearray()
            self._read(node, held, [(begin, length)], lambda piece, _: content.extend(piece))
            return bytes(content)

        spans = checked_spans(read, TENSORS, header.tensors, f"the image of rank {held.rank}")
        return json_of(read(TENSORS + header.tensors, header.description).decode()), spans

    def _read(
        self, node: int, held: HeldImage, parts: list[tuple[int, int]], put: Callable[[bytes, int], object]
    ) -> None:
        for begin, length in parts:
            with socket.create_connection(self._addresses[node], SECONDS) as connection:
                header = held.said.original.packed().hex()
                send_head(
                    connection, "read", token=self._token, rank=held.rank, header=header, begin=begin, length=length
                )
                if answer_of(connection, "bytes").get("length") != length:
                    raise RuntimeFault("a keeper gives other bytes than those it was asked for")
                receive_bytes(connection, [(begin, length)], put)
            self.bytes += length


def _shifted(image: Image, shift: int, content: bytes, begin: int) -> None:
    """Write bytes that lie ``shift`` bytes further on in this image."""
    image.write(content, begin + shift)


def _keys(description: dict[str, Any], without: set[str] = frozenset()) -> dict[tuple[Any, ...], str]:  # type: ignore[assignment]
    """By name, offset and size of a box, its key in the file."""
    return {
        (name, tuple(box["offset"]), tuple(box["size"])): box["key"]
        for name, entry in description["tensors"].items()
        for box in entry["boxes"]
        if box["key"] not in without
    }
