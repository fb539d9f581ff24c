"""Messages from strangers to a keeper: each must be refused, open no other file, and leave no torn image."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.keeper.images import TENSORS, Image, ImageHeader
from schedc_runtime.keeper.lost import HeldImage, LostImages, LostState
from schedc_runtime.keeper.messages import ANSWERED, MOST_HEAD, receive_head
from schedc_runtime.keeper.peer_server import PeerServer
from schedc_runtime.keeper.places import Peers, Places

TOKEN = "5a" * 32
CONTENT = bytes(range(256)) * 16
TEXT = b'{"attempt":"a","run":{"world":2},"tensors":{}}'
HEADER = ImageHeader(1, 7, False, len(CONTENT), len(TEXT), sha256(TEXT).digest())
SIZE = TENSORS + len(CONTENT) + len(TEXT)
PUT = {"op": "put", "token": TOKEN, "rank": 1, "header": HEADER.packed().hex(), "safe": -1, "size": SIZE,
       "parts": [[TENSORS, len(CONTENT)]]}  # fmt: skip
READ = {"op": "read", "token": TOKEN, "rank": 0, "header": HEADER.packed().hex(), "begin": TENSORS, "length": 64}
ODD = ("../rank-0001", "/etc/passwd", "", "\0", "\x1b[2J", "é" * 64, "\ud800", "00" * 32, TOKEN.upper())
NUMBERS = (-(1 << 70), -2, -1, 0, 2, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 80, 1.5, True, None, [], {}, [[]])
PARTS = ([[0, 10]], [[TENSORS, -1]], [[TENSORS, 1 << 62]], [[TENSORS, 10], [TENSORS, 10]], [["a", 1]], [[TENSORS]], [1],
         [[TENSORS + len(CONTENT), 1]], [[TENSORS, 0]] * 3, [{}], [[TENSORS, 1.0]])  # fmt: skip


def message(head: Any, body: bytes = b"", magic: bytes = b"sdcK", version: int = 1, length: int = -1) -> bytes:
    """The bytes of a message. length: bytes of the head, as the message says; by default the truth."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode("utf-8", "surrogatepass")
    return struct.pack("<4sII", magic, version, len(text) if length < 0 else length) + text + body


def body_of(content: bytes = CONTENT + TEXT) -> bytes:
    return content + struct.pack("<I", crc32(content))


def altered_message(draw: random.Random) -> tuple[str, bytes]:
    """What is wrong with a message, and the message."""
    head: dict[str, Any] = dict(draw.choice((PUT, READ)))
    body = body_of() if head["op"] == "put" else b""
    key = draw.choice(list(head))
    flipped = bytearray(HEADER.packed())
    flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    cut, spoilt = draw.randrange(1, len(body_of())), bytearray(body_of())
    spoilt[draw.randrange(len(spoilt))] ^= 1
    most = draw.choice((MOST_HEAD + 1, (1 << 32) - 1))
    kinds: dict[str, Callable[[], bytes]] = {
        "noise": lambda: draw.randbytes(draw.randint(1, 200)),
        "head too long": lambda: message({**head, "more": "x" * MOST_HEAD}, body),
        "length too long": lambda: message(head, body, length=most),
        "length lies": lambda: message(head, length=draw.randint(0, 600)),
        "magic": lambda: message(head, body, magic=b"PK\x03\x04"),
        "version": lambda: message(head, body, version=draw.choice((0, 2, 1 << 31))),
        "pickle": lambda: message(b"\x80\x04cos\nsystem\n(S'echo'\ntR.", body),
        "op": lambda: message({**head, "op": draw.choice(("", "run", "go", None, 1, [], "\ud800"))}, body),
        "lost key": lambda: message({name: each for name, each in head.items() if name != key}, body),
        "unknown key": lambda: message({**head, draw.choice(ODD): 1}, body),
        "key twice": lambda: message(json.dumps(head)[:-1].encode() + b',"rank":1,"rank":2}', body),
        "deep": lambda: message(b"[" * 60_000, body),
        "no object": lambda: message(draw.choice(([], None, 1, "x", [PUT])), body),
        "no text": lambda: message(b'{"op":"\xff\xfe"}', body),
        "NaN": lambda: message(b'{"op":NaN,"token":1e999}', body),
        "long number": lambda: message(b'{"op":"put","rank":' + b"9" * 5000 + b"}", body),
        "token": lambda: message({**head, "token": draw.choice(ODD)}, body),
        "odd name": lambda: message({**head, key: draw.choice(ODD)}, body),
        "odd number": lambda: message({**head, key: draw.choice(NUMBERS)}, body),
        "rank": lambda: message({**PUT, "rank": draw.choice((0, 2, -1, 1 << 40))}, body_of()),
        "parts": lambda: message({**PUT, "parts": draw.choice(PARTS)}, body_of()),
        "size": lambda: message({**PUT, "size": draw.choice((0, SIZE - 1, 1 << 40, (1 << 63) - 1))}, body_of()),
        "header": lambda: message({**PUT, "header": bytes(flipped).hex()}, body_of()),
        "header of sizes": lambda: message(
            {**PUT, "header": HEADER._replace(tensors=draw.choice((1 << 62, 1 << 40, 0))).packed().hex()}, body_of()
        ),
        "cut": lambda: message(PUT, body_of()[:cut]),
        "bits": lambda: message(PUT, bytes(spoilt)),
        "other text": lambda: message(PUT, body_of(CONTENT + TEXT[::-1])),
        "bytes outside": lambda: message({**READ, "begin": draw.choice((0, SIZE - 1, 1 << 62)), "length": 99}),
        "bytes of others": lambda: message({**READ, "rank": draw.choice((1, 5, 10**9)), "header": draw.choice(ODD)}),
    }
    name = draw.choice(list(kinds))
    return name, kinds[name]()


@contextmanager
def listening(folder: Path) -> Iterator[tuple[Places, PeerServer, list[str]]]:
    """A keeper's server in a folder, whose rank 0 has an image; and the errors that ended one of its threads."""
    places, faults, hook = Places.of_run(folder, "hostile"), list[str](), threading.excepthook
    threading.excepthook = lambda ended: faults.append(f"{ended.exc_type.__name__}: {ended.exc_value}"[:200])
    peers = Peers(TOKEN, "127.0.0.1", 0, None, None, [0], [1], SIZE, 1e9)
    places.say_peers(peers)
    image = Image.made(places.image_paths(0)[0], SIZE)
    image.write(CONTENT, TENSORS)
    image.finish(1, 7, False, len(CONTENT), TEXT)
    image.close()
    server = PeerServer(places, peers)
    try:
        yield places, server, faults
    finally:
        server.close()
        threading.excepthook = hook


def answered(port: int, content: bytes) -> str:
    """What a keeper answers: the last op, or "closed"."""
    told = "closed"
    with socket.create_connection(("127.0.0.1", port), 5.0) as connection, suppress(OSError):
        with suppress(OSError):
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
        while (head := receive_head(connection, ANSWERED)) is not None:
            told = head["op"]
            if told == "bytes":
                return told
    return told


def torn(places: Places) -> bool:
    """Whether an image is valid that is not the one that was sent."""
    for rank in places.ranks():
        for image in places.images(rank):
            header = image.header()
            right = header is None or (
                image.read(TENSORS, len(CONTENT)) == CONTENT and image.description(header) == json.loads(TEXT)
            )
            image.close()
            if not right:
                return True
    return False


def hostile_message(folder: Path, draw: random.Random) -> tuple[str, str]:
    """Send a keeper an altered message. Returns what was altered, and ``refused``, ``read`` or what went wrong."""
    if draw.random() < 0.2:
        return hostile_answer(draw)
    name, content = altered_message(draw)
    with listening(folder) as (places, server, faults):
        told = answered(server.port, content)
        wrong = faults or (["it answers no more"] if answered(server.port, message(READ)) != "bytes" else [])
        if torn(places):
            wrong = ["a torn image is valid"]
    if wrong:
        return name, wrong[0]
    return name, "read" if told in ("held", "bytes") else "refused"


def hostile_answer(draw: random.Random) -> tuple[str, str]:
    """A keeper that answers nonsense to who asks for an image: only an error of ours may come of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    answers = (
        b"", draw.randbytes(40), message({"op": "go"}), message({"op": "bytes", "length": 1 << 62}),
        message({"op": "bytes", "length": len(CONTENT)}, CONTENT[:100]),
        message({"op": "bytes", "length": len(CONTENT)}, CONTENT + b"\0\0\0\0"),
        message({"op": "bytes", "length": 64, "more": 1}), message({"op": "refused", "why": "x" * 60_000}),
        message({"op": "bytes"}, length=1 << 31), message(b"{" * 1000),
    )  # fmt: skip
    content = draw.choice(answers)

    def answer() -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(5.0)
                receive_head(connection, {READ["op"]: {k: type(v) for k, v in READ.items() if k != "op"}})
                connection.sendall(content)

    thread = threading.Thread(target=answer)
    thread.start()
    held = HeldImage(0, HEADER.packed().hex(), SIZE, "a", 2, False)
    lost = LostImages(LostState(7, "a", {0: [(0, held)]}), [listener.getsockname()[:2]], TOKEN, 1)
    try:
        lost._read(0, held, [(TENSORS, len(CONTENT))], lambda *_: None)
        outcome = "read"
    except (RuntimeFault, OSError):
        outcome = "refused"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"[:200]
    thread.join()
    listener.close()
    return "an answer", outcome
