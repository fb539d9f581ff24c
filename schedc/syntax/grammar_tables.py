"""Builds the tables of the grammar where it is imported: a server's forked processes then have the tables."""

from __future__ import annotations

from schedc.syntax.parser import grammar

grammar()
