"""Drawings of schedules, cells and stages: as SVG, as a page, as text, as graphs."""
