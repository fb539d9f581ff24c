"""Codes of family S6."""

from __future__ import annotations

from schedc.codes.base import Code

S6: tuple[Code, ...] = ()
