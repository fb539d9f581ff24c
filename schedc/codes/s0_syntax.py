"""Codes of family S0."""

from __future__ import annotations

from schedc.codes.base import Code

S0: tuple[Code, ...] = ()
