"""``python -m schedc``."""

from schedc.cli import main

main()
