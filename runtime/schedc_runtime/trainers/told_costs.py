"""Says what keeping states costs: memory, the keeper, and bytes over the network."""

from __future__ import annotations

from collections.abc import Sequence

from schedc_runtime.keeper.start import KeeperMeeting


def told_costs(meeting: KeeperMeeting, image: int, copied: Sequence[int], slots: int) -> list[str]:
    """Lines for people. image: bytes of an image of this rank.

    copied: [ranks] bytes of a state that go to neighbours now; [] without neighbours. slots: bytes that optimizers
    will add to this rank's state.
    """
    grown = image / max(1, image - slots)
    memory, nodes, watch = meeting.places.folder.parent, meeting.nodes, meeting.places.watch()
    keeper = f"the keeper (pid {watch.process.pid}) takes {watch.resident / 1e6:.0f} MB" if watch else "no keeper"
    each = f"  each rank keeps 2 x {image / 1e9:.3f} GB in {memory}"
    if nodes is None:
        return [f"{each}; {keeper} and sends nothing over the network"]
    sent, taken = (sum(copied[rank] for rank in nodes.ranks[node]) * grown / 1e9 for node in (nodes.here, nodes.before))
    to = ":".join(map(str, meeting.addresses[nodes.behind]))
    return [
        f"{each}, and its node 2 x {taken:.3f} GB of the neighbour's",
        f"  {keeper} and sends {sent:.3f} GB a state to {to}, {meeting.speed / 1e9:g} GB a second at most",
    ]
