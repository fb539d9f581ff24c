"""Codes of family S5."""

from __future__ import annotations

from schedc.codes.base import Code

S5: tuple[Code, ...] = ()
