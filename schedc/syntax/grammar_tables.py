"""Builds the tables of the grammar where it is imported: for a server that forks processes, which then have them."""

from __future__ import annotations

from schedc.syntax.parser import grammar

grammar()
