"""Codes of family S1."""

from __future__ import annotations

from schedc.codes.base import Code

S1: tuple[Code, ...] = ()
