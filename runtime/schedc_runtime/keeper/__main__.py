"""``python -m schedc_runtime.keeper FOLDER``: the keeper of the images in a folder. Ranks start it."""

import sys
from pathlib import Path

from schedc_runtime.keeper.watch import be_keeper

sys.exit(be_keeper(Path(sys.argv[1])))
