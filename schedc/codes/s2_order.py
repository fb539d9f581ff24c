"""Codes of family S2."""

from __future__ import annotations

from schedc.codes.base import Code

S2: tuple[Code, ...] = ()
