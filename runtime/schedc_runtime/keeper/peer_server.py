"""A keeper's side that listens: takes images of ranks of another node, and gives images to nodes that lost theirs.

Only who has the token of the attempt gets an answer other than no. A copy is an image like those of
ranks here, under the same rule: its header comes last, and that of the safe step is never written over.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from hmac import compare_digest
from typing import Any

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.keeper.images import TENSORS, Image, ImageHeader
from schedc_runtime.keeper.messages import (
    ASKED,
    PIECE,
    SECONDS,
    MessageRefused,
    checked_parts,
    receive_bytes,
    receive_head,
    send_bytes,
    send_head,
)
from schedc_runtime.keeper.places import Peers, Places

_MOST_CONNECTIONS = 64
_IDLE = 3600.0
"""Seconds that a connection with the right token may be silent between messages."""
_MORE = 64 << 20
"""Bytes that an image may have beyond twice the largest at the start: states of loaders grow."""


class PeerServer:
    """Listens at the address of `Peers`, each connection in a thread of its own. Raises `OSError` if it cannot."""

    def __init__(self, places: Places, peers: Peers) -> None:
        self._places = places
        self._listener = socket.create_server((peers.host, peers.port), backlog=_MOST_CONNECTIONS)
        self.port: int = self._listener.getsockname()[1]
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._open = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        threading.Thread(target=self._accept, name="schedc-listener", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread that waits there would take one more connection
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if self._open.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), name="schedc-peer", daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answer all that comes over a connection; close it behind the first message that is not as it must be."""
        try:
            with connection, suppress(OSError):
                try:
                    connection.settimeout(SECONDS)
                    while (ask := receive_head(connection, ASKED)) is not None:
                        connection.settimeout(SECONDS)
                        self._answer(connection, ask)
                        connection.settimeout(_IDLE)
                except RuntimeFault as fault:
                    send_head(connection, "refused", why=fault.message[:1000])
        finally:
            self._open.release()

    def _answer(self, connection: socket.socket, ask: dict[str, Any]) -> None:
        peers = self._places.peers()
        if peers is None or not compare_digest(peers.token.encode(), ask["token"].encode()):
            raise MessageRefused("the token belongs to no attempt that runs here")
        if ask["op"] == "read":
            self._give(connection, ask)
        elif ask["rank"] not in peers.others:
            raise MessageRefused(f"images of rank {ask['rank']} do not belong here")
        else:
            lock = self._locks[ask["rank"]]
            if not lock.acquire(blocking=False):
                raise MessageRefused(f"an image of rank {ask['rank']} is under way already")
            try:
                self._take(connection, ask, peers)
            finally:
                lock.release()

    def _take(self, connection: socket.socket, ask: dict[str, Any], peers: Peers) -> None:
        """Receive an image."""
        header = _header(ask["header"])
        end = 0 if header is None else TENSORS + header.tensors
        if header is None or not end + header.description <= ask["size"] <= 2 * peers.most + _MORE:
            raise MessageRefused("the header of an image is not valid, or its size is not")
        parts = [*checked_parts(ask["parts"], TENSORS, end), (end, header.description)]
        with _Opened(self._places.images(ask["rank"])) as images:
            if any((held := image.header()) is not None and held.original == header.original for image in images):
                send_head(connection, "held")
                return
        whole = sum(length for _, length in parts) == header.tensors + header.description
        with _Opened([self._free(ask["rank"], ask["safe"], ask["size"], whole)]) as (image,):
            send_head(connection, "go")
            image.clear()
            text = bytearray()

            def put(piece: bytes, begin: int) -> None:
                image.write(piece, begin)
                if begin >= end:
                    text.extend(piece)

            receive_bytes(connection, parts, put)
            if (now := self._places.peers()) is None or now.token != peers.token:
                raise MessageRefused("another attempt has begun")
            if sha256(text).digest() != header.digest:
                raise MessageRefused("the description of an image has another digest than its header says")
            image.put(header._replace(copy=True))
            send_head(connection, "held")

    def _free(self, rank: int, safe: int, size: int, whole: bool) -> Image:
        """The image to write over: an empty one, or else the older of those that are not of the step ``safe``."""
        steps = []
        for path in self._places.image_paths(rank):
            image = Image.opened(path)
            header = None if image is None else image.header()
            fits = image is not None and image.size >= size
            if image is not None:
                image.close()
            steps.append((-1 if header is None else header.step + (header.step == safe) * (1 << 63), path, fits))
        _, path, fits = min(steps, key=lambda each: each[0])
        opened = Image.opened(path) if fits else None
        return Image.made(path, size, whole) if opened is None else opened

    def _give(self, connection: socket.socket, ask: dict[str, Any]) -> None:
        """Send bytes of an image."""
        begin, end, wanted = ask["begin"], ask["begin"] + ask["length"], _header(ask["header"])
        with _Opened(self._places.images(ask["rank"])) as images:
            for image in images:
                header = image.header()
                if header is None or header.original != wanted:
                    continue
                if begin < TENSORS or end > TENSORS + header.tensors + header.description:
                    raise MessageRefused("the bytes lie outside of the image")
                send_head(connection, "bytes", length=ask["length"])
                send_bytes(connection, image_pieces(image, header, [(begin, ask["length"])]))
                return
        raise MessageRefused(f"this node no longer holds that image of rank {ask['rank']}")


class ImageChanged(OSError):
    """An image has been written anew while it was read. The connection must end."""


def image_pieces(image: Image, header: ImageHeader, parts: list[tuple[int, int]]) -> Iterator[bytes]:
    """The bytes of [(begin, length)] parts of an image. Raises `ImageChanged` where it has another header now."""
    for begin, length in parts:
        for first in range(begin, begin + length, PIECE):
            piece = image.read(first, min(PIECE, begin + length - first))
            if image.header() != header:
                raise ImageChanged("the image has changed")
            yield piece


class _Opened(list[Image]):
    """Images that are closed behind a block."""

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        for image in self:
            image.close()


def _header(text: str) -> ImageHeader | None:
    try:
        return ImageHeader.unpacked(bytes.fromhex(text))
    except ValueError:
        return None
