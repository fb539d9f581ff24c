"""Brings images back from neighbours when a run goes on without a node that it had."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.keeper.lost import HeldImage, LostImages, held_images, newest_state
from schedc_runtime.keeper.start import KeeperMeeting

if TYPE_CHECKING:
    from schedc_runtime.ranks.control import ControlPlane
    from schedc_runtime.trainers.image_writer import ImageWriter

_WHAT = "bringing lost images back"


def bring_back(
    control: ControlPlane, meeting: KeeperMeeting, writer: ImageWriter, allowed: int | None = None
) -> list[str]:
    """Give each rank its image of the newest state that nodes hold together. A collective; says what was done.

    allowed: the newest step that may be used; None for any. That of rank 0 counts.
    """
    nodes, rank = meeting.nodes, control.process
    assert nodes is not None
    leads = nodes.ranks[nodes.here][0] == rank
    meeting.pause()
    told = control.gather(_WHAT, [held_images(meeting.places) if leads else None, allowed])
    held = [[HeldImage(*each) for each in told[ranks[0]][0]] for ranks in nodes.ranks]
    state = newest_state(held, len(control.names), told[0][1])
    if state is None:
        return []
    lost, begin = LostImages(state, meeting.addresses, nodes.token, nodes.here), time.monotonic()
    why, here = "", lost.is_here(rank)
    if not here:
        try:
            lost.bring(rank, writer.images, writer.room)
        except (OSError, ValueError, RuntimeFault) as error:
            why = error.message if isinstance(error, RuntimeFault) else str(error)
    answers: list[Any] = control.gather(_WHAT, [here, lost.bytes, time.monotonic() - begin, why])
    lines = [f"  left out: the copy of {name} in step {state.step:,}: {fault}"
             for name, (_, _, _, fault) in zip(control.names, answers, strict=True) if fault]  # fmt: skip
    back = [
        (name, answer) for name, answer in zip(control.names, answers, strict=True) if not answer[0] and not answer[3]
    ]
    if back:
        total, seconds = sum(answer[1] for _, answer in back) / 1e9, max(answer[2] for _, answer in back)
        names = ", ".join(name for name, _ in back)
        lines.append(f"  {names}: step {state.step:,} from neighbours, {total:.3f} GB in {seconds:.1f} s")
    return lines
