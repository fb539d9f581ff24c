"""Serves editors: the diagnostics of `schedc check` and the layout of `schedc fmt`, while a file is being written."""
