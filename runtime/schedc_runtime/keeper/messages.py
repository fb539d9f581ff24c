"""Messages between keepers: a JSON head of at most 64 KiB, and raw bytes behind it. What is received is data alone.

0   form      magic, version, length of the head
12  head      JSON: `op` and the entries of `ASKED` or `ANSWERED`, no more and no less
    bytes     as many as the head says, then their crc32
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from zlib import crc32

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.saved.plain import json_of, sizes

MOST_HEAD = 1 << 16
"""Bytes of a head."""
PIECE = 1 << 20
"""Bytes that are read or written at once."""
SECONDS = 10.0
"""Seconds that a connection may be silent."""
_FORM = struct.Struct("<4sII")
_SUM = struct.Struct("<I")
_MAGIC, _VERSION = b"sdcK", 1

Types = Mapping[str, Mapping[str, type]]

ASKED: Types = {
    "put": {"token": str, "rank": int, "header": str, "safe": int, "size": int, "parts": list},
    "read": {"token": str, "rank": int, "header": str, "begin": int, "length": int},
}
"""By op, what is asked of a keeper.

put: take the image of ``rank`` with the ``header`` (hexadecimal) in a file of ``size`` bytes; ``parts`` [[begin,
length]] of the file follow. safe: the step whose image must stay, or -1.
read: give ``length`` bytes from ``begin`` on of the rank's image with this ``header``, which is that of the original.
"""
ANSWERED: Types = {
    "go": {},
    "held": {},
    "bytes": {"length": int},
    "refused": {"why": str},
}
"""By op, what a keeper answers. held: the image is here. refused: why not, in words."""


class MessageRefused(RuntimeFault):
    """A message between keepers that is not as it must be, or that the other keeper has refused."""


def send_head(connection: socket.socket, op: str, **entries: Any) -> None:
    """Send a head. Raises `MessageRefused` for one that is too long, and `OSError`."""
    text = json.dumps({"op": op, **entries}, separators=(",", ":")).encode()
    if len(text) > MOST_HEAD:
        raise MessageRefused(f"a head of {len(text)} bytes is too long")
    connection.sendall(_FORM.pack(_MAGIC, _VERSION, len(text)) + text)


def receive_head(connection: socket.socket, types: Types) -> dict[str, Any] | None:
    """A head with one of the ``types``; None where the other end has closed the connection before.

    Raises `MessageRefused` for any other bytes, and `OSError`.
    """
    first = connection.recv(1)
    if not first:
        return None
    magic, version, length = _FORM.unpack(first + b"".join(received(connection, _FORM.size - 1)))
    if magic != _MAGIC:
        raise MessageRefused("the other end is no keeper")
    if version != _VERSION:
        raise MessageRefused(f"the other end speaks version {version}, and this one {_VERSION}", "run one version")
    if length > MOST_HEAD:
        raise MessageRefused(f"a head of {length} bytes is too long")
    text = b"".join(received(connection, length))
    try:
        value = json_of(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise MessageRefused(f"a head is no JSON: {str(error)[:200]}") from None
    op = value.pop("op", None) if isinstance(value, dict) else None
    expected = types.get(op) if isinstance(op, str) else None
    if expected is None or {name: type(each) for name, each in value.items()} != expected:
        raise MessageRefused("a head has other entries than those of a message between keepers")
    if any(isinstance(each, int) and not -1 <= each < 1 << 63 for each in value.values()):
        raise MessageRefused("a number is out of range")
    return {"op": op, **value}


def answer_of(connection: socket.socket, op: str) -> dict[str, Any]:
    """The answer, which must be ``op`` or ``held``. Raises `MessageRefused` with the other keeper's reason."""
    head = receive_head(connection, ANSWERED)
    if head is None:
        raise ConnectionResetError("the other keeper has closed the connection")
    if head["op"] == "refused":
        raise MessageRefused(f"the other keeper refuses: {head['why'][:400]}")
    if head["op"] not in (op, "held"):
        raise MessageRefused(f"the other keeper answers `{head['op']}`")
    return head


def received(connection: socket.socket, length: int) -> Iterator[bytes]:
    """``length`` bytes in pieces. Raises `ConnectionResetError` where the connection ends before."""
    while length:
        piece = connection.recv(min(length, PIECE))
        if not piece:
            raise ConnectionResetError(f"the connection ends {length} bytes too early")
        length -= len(piece)
        yield piece


def send_bytes(connection: socket.socket, pieces: Iterator[bytes]) -> None:
    """Send pieces, then the crc32 of all."""
    total = 0
    for piece in pieces:
        total = crc32(piece, total)
        connection.sendall(piece)
    connection.sendall(_SUM.pack(total))


def receive_bytes(connection: socket.socket, parts: list[tuple[int, int]], put: Callable[[bytes, int], object]) -> None:
    """Receive [(begin, length)] parts in order, and give each piece with its begin to ``put``.

    Raises `MessageRefused` where their crc32 differs.
    """
    total = 0
    for begin, length in parts:
        for piece in received(connection, length):
            total = crc32(piece, total)
            put(piece, begin)
            begin += len(piece)
    if b"".join(received(connection, _SUM.size)) != _SUM.pack(total):
        raise MessageRefused("bytes have changed on their way")


def checked_parts(value: Any, first: int, last: int) -> list[tuple[int, int]]:
    """[(begin, length)] of JSON: disjoint, in order, inside of ``first`` ..< ``last``. Raises `MessageRefused`."""
    parts = []
    for each in value:
        part = sizes(each)
        if part is None or len(part) != 2 or part[0] < first or part[0] + part[1] > last:
            raise MessageRefused("a part lies outside of its image")
        parts.append((part[0], part[1]))
        first = part[0] + part[1]
    return parts
