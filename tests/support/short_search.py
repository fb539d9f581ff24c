"""Shortens the search for the orders inside of cells, for tests that ask for the bits of an order and not for its time.

Such a search is the larger part of what it takes to build a small pipeline, and every rank searches by itself.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import parent_process

from schedc.cell import local_search
from schedc.cell.schedule import forget_programs

VARIED, TRIES_PER_TASK = 4, 20


@contextmanager
def short_search() -> Generator[None]:
    """Search shortly inside of the block; what was found inside stays there."""
    whole = local_search.VARIED, local_search.TRIES_PER_TASK
    forget_programs()
    _search(VARIED, TRIES_PER_TASK)
    try:
        yield
    finally:
        _search(*whole)
        forget_programs()


def search_shortly_on_ranks() -> None:
    """Search shortly from here on, in a process of a pool of ranks; elsewhere do nothing."""
    if parent_process() is not None:
        _search(VARIED, TRIES_PER_TASK)


def on_rank(_rank: int, _world_size: int) -> None:
    """`search_shortly_on_ranks`, as a case of a pool: for ranks whose later cases load nothing of the tests."""
    search_shortly_on_ranks()


def _search(varied: int, tries: int) -> None:
    local_search.VARIED, local_search.TRIES_PER_TASK = varied, tries
