"""From text to a syntax tree with places, and back."""
