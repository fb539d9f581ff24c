"""The interactive page: one HTML file without a network, drawn on a canvas by a script of our own."""
