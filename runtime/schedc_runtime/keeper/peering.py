"""The neighbours of a node: how keepers learn of each other, and what a keeper does for them."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.keeper.peer_server import PeerServer
from schedc_runtime.keeper.places import Peers, Places, RankHere, Watch
from schedc_runtime.keeper.sender import ImageSender

_ANSWERS = 2.0
"""Seconds in which a keeper that lives accepts a connection."""
_SAY = 1.0
"""Seconds between two reports of the bytes that have been sent."""


class Nodes(NamedTuple):
    """The nodes of an attempt. ranks: [nodes] of ranks. here: number of this node. token: of the attempt."""

    ranks: list[list[int]]
    here: int
    token: str

    @property
    def before(self) -> int:
        """The node whose images come here."""
        return (self.here - 1) % len(self.ranks)

    @property
    def behind(self) -> int:
        """The node that takes the images of this node."""
        return (self.here + 1) % len(self.ranks)

    def peers(self, host: str, port: int, addresses: Sequence[tuple[str, int]], most: int, speed: float) -> Peers:
        """What the keeper here has to know before it sends. addresses: [nodes] of keepers; [] if they are unknown."""
        before = addresses[self.before] if addresses else None
        return Peers(self.token, host, port, None, before, self.ranks[self.here], self.ranks[self.before], most, speed)


def check_nodes(replicas: int, speed: float, ranks: Sequence[Sequence[int]], folder: str) -> None:
    """Raise `RuntimeFault` where states cannot be copied to a neighbour. folder: of the images of this rank's node."""
    if replicas not in (0, 1) or not 0 < speed < float("inf"):
        raise RuntimeFault(
            f"replicas={replicas}, peer_speed={speed}", "replicas is 0 or 1, peer_speed is in bytes per second"
        )
    if replicas and len(ranks) == 1:
        raise RuntimeFault(
            f"replicas=1 copies states to a neighbour, and all {len(ranks[0])} ranks have their images in {folder}"
            " of one machine",
            "start ranks on two machines or more, or leave replicas out; on one machine, agents with another"
            " memory=... count as nodes",
        )


def own_address() -> str:
    """The address of this machine as seen from the machine of rank 0."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "localhost"), 9))  # sends nothing
        return str(probe.getsockname()[0])


def orphans(places: Places, trainers: Sequence[RankHere]) -> list[RankHere]:
    """The ranks whose copies are here and whose keeper does not answer: their node is lost. trainers: ranks here."""
    peers = places.peers()
    if peers is None or peers.before is None:
        return []
    try:
        socket.create_connection(peers.before, _ANSWERS).close()
    except OSError:
        return [trainers[0]._replace(rank=rank, name=f"rank {rank}") for rank in peers.others]
    return []


class Peering:
    """What a keeper does for its neighbours: it listens, and sends."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._server: PeerServer | None = None
        self._deaf = ""
        self._sender = ImageSender(places)
        self._told: tuple[int, str] | None = None
        self._sent, self._at = 0, 0.0

    @property
    def port(self) -> int:
        """The port of this keeper; -1 if it cannot listen."""
        return -1 if self._deaf else 0 if self._server is None else self._server.port

    def news(self) -> bool:
        """Listen if that is due; whether ranks need the news again."""
        peers = self._places.peers()
        if peers is not None and self._server is None and not self._deaf:
            try:
                self._server = PeerServer(self._places, peers)
            except OSError as error:
                self._deaf = f"no keeper can listen at {peers.host}:{peers.port}: {error}"
                print(f"schedc: {self._deaf}", file=sys.stderr, flush=True)
        now, told = time.monotonic(), (self.port, self._deaf or self._sender.trouble)
        if told == self._told and (self._sender.sent == self._sent or now - self._at < _SAY):
            return False
        self._told, self._sent, self._at = told, self._sender.sent, now
        return True

    def said(self, watch: Watch) -> Watch:
        """Adds port, bytes and trouble to what a keeper says of itself."""
        return watch._replace(port=self.port, sent=self._sender.sent, trouble=self._deaf or self._sender.trouble)

    def close(self) -> None:
        self._sender.close()
        if self._server is not None:
            self._server.close()
