"""Codes of family S3."""

from __future__ import annotations

from schedc.codes.base import Code

S3: tuple[Code, ...] = ()
