"""Codes of family S4."""

from __future__ import annotations

from schedc.codes.base import Code

S4: tuple[Code, ...] = ()
