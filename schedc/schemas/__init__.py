"""The forms of all JSON that the command prints: a table of fields, and JSON Schemas made from it."""
