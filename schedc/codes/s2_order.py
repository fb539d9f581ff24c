"""Codes of family S2: which ops a schedule must have, where, and in which order on a rank."""

from __future__ import annotations

from schedc.codes.base import Code

S2: tuple[Code, ...] = ()
