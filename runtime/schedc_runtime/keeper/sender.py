"""A keeper's side that sends: the newest image of each rank here goes to the keeper of the next node.

A thread of low priority sends at most so many bytes a second. Training does not wait for it. While an image is under
way, further states are left out. A neighbour that does not answer is reported once.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.keeper.images import TENSORS, Image, ImageHeader, parts_besides
from schedc_runtime.keeper.messages import MOST_HEAD, SECONDS, MessageRefused, answer_of, send_bytes, send_head
from schedc_runtime.keeper.peer_server import ImageChanged, image_pieces
from schedc_runtime.keeper.places import Peers, Places
from schedc_runtime.saved.safetensors import spans_in

_LOOK = 0.02
"""Seconds between two looks for a new image."""
PATIENCE = 10.0
"""Seconds of errors after which ranks no longer wait for the neighbour."""
_AGAIN = 0.5
"""Seconds behind an error."""
NICE = 10


class ImageSender:
    """Sends images while the process lives."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.sent = 0
        """Bytes of images so far."""
        self.trouble = ""
        """Why states stay on this node alone; "" if they do not."""
        self._since = 0.0
        self._connection: socket.socket | None = None
        self._peers: Peers | None = None
        self._due = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="schedc-sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, behind the piece that is under way."""
        self._ended.set()
        self._thread.join(_AGAIN)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not self._ended.wait(_LOOK):
            peers = self._places.peers()
            if peers != self._peers:
                self._hang_up()
                self._peers, self._since, self.trouble = peers, 0.0, ""
            if peers is not None and peers.to is not None:
                for rank in peers.mine:
                    self._look(rank, peers)
        self._hang_up()

    def _look(self, rank: int, peers: Peers) -> None:
        """Send the newest image of a rank, unless the neighbour has it."""
        images = self._places.images(rank)
        try:
            valid = [(header, image) for image in images if (header := image.header()) is not None]
            header, image = max(valid, key=lambda each: each[0].step, default=(None, None))
            if header is None or image is None or image.backed:
                return
            try:
                self._send(rank, image, header, peers)
            except ImageChanged:
                self._hang_up()  # the next look finds another one
            except (OSError, ValueError, RuntimeFault) as error:
                self._failed(error, peers)
            else:
                self._since = 0.0
                if self.trouble:
                    self.trouble = ""
                    _say(f"the keeper at {_name(peers)} answers again")
        finally:
            for image in images:
                image.close()

    def _send(self, rank: int, image: Image, header: ImageHeader, peers: Peers) -> None:
        parts, safe = _parts(image, header)
        ask = {"token": peers.token, "rank": rank, "header": header.packed().hex(), "safe": safe, "size": image.size}
        connection = self._connected(peers)
        send_head(connection, "put", **ask, parts=parts)
        if answer_of(connection, "go")["op"] == "go":
            whole = [*parts, (TENSORS + header.tensors, header.description)]
            send_bytes(connection, self._paced(image_pieces(image, header, whole), peers.speed))
            if answer_of(connection, "held")["op"] != "held":
                raise MessageRefused("the other keeper has not taken the image")
        image.note_backed(header)

    def _paced(self, content: Iterator[bytes], speed: float) -> Iterator[bytes]:
        for piece in content:
            now = time.monotonic()
            if (wait := self._due - now) > 0 and self._ended.wait(wait):
                raise ImageChanged("the keeper ends")
            self._due = max(self._due, now) + len(piece) / speed
            self.sent += len(piece)
            yield piece

    def _connected(self, peers: Peers) -> socket.socket:
        if self._connection is None:
            assert peers.to is not None
            self._connection = socket.create_connection(peers.to, SECONDS)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._connection

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _failed(self, error: Exception, peers: Peers) -> None:
        self._hang_up()
        now = time.monotonic()
        self._since = self._since or now
        if not self.trouble and now - self._since > PATIENCE:
            why = error.message if isinstance(error, RuntimeFault) else str(error)
            self.trouble = f"states of ranks {', '.join(map(str, peers.mine))} stay on this node alone: {why}"
            _say(f"{self.trouble} (keeper at {_name(peers)}); training goes on")
        self._ended.wait(_AGAIN)


def _parts(image: Image, header: ImageHeader) -> tuple[list[tuple[int, int]], int]:
    """[(begin, length)] what no other node has of an image's tensors, and the safe step when it was written."""
    description = image.description(header)
    if description is None:
        raise ImageChanged("the image has changed")
    safe = description.get("safe", -1)
    elsewhere = set(description.get("elsewhere", ()))
    everything = [(TENSORS, header.tensors)]
    if not elsewhere:
        return everything, safe
    parts = parts_besides(spans_in(image.path, TENSORS, header.tensors), elsewhere, header.tensors)
    return (parts, safe) if len(parts) * 40 < MOST_HEAD // 2 else (everything, safe)


def _name(peers: Peers) -> str:
    host, port = peers.to or ("", 0)
    return f"{host}:{port}"


def _say(text: str) -> None:
    print(f"schedc: {text}", file=sys.stderr, flush=True)
