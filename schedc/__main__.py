"""The entry of the command line: ``schedc`` and ``python -m schedc``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that the arguments name.

    Ctrl-C prints one line and ends with status 130, even while modules are loading.
    """
    try:
        from schedc.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
