"""``python -m schedc.cli``."""

from schedc.cli import main

main()
