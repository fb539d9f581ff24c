"""Writes and reads schedules in the formats of other tools."""
