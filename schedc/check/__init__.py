"""Checks a schedule's text before any size is known: names, roles, shapes, places of computed orders."""
