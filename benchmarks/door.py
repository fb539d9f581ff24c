"""What a newcomer meets: comparison, editor, fixes, formats of other tools, schemas, site, playground, adapters.

    python benchmarks/door.py WORD [--json] [--cases N]

compare    rows of `schedc compare` at drawn sizes and costs against `schedc check` of the command that each row names.
editor     `schedc lsp` over its protocol with every schedule of the library at its default sizes: the time of each
           answer, 200 drawn places to complete a word, and places behind signs of two UTF-16 units. Every name of the
           library gets another one, and the program must stay as it is.
fixes      edits of findings: each must end its finding and begin no other.
sarif      the findings of `examples/mistakes` as SARIF: its form, and every region inside of its file. The published
           schema judges them and the findings of every wrong text of a code, where `make sarif` has fetched it.
schemas    outputs of ten commands against their JSON Schemas, and 10,000 outputs with a fault, to be refused.
site       the site, built as `make docs` does: seconds, warnings, links that lead nowhere, requests to other hosts.
           Every page in Chromium at 1,400 and 420 px, light and dark: width, contrast, faults.
playground the page of `make playground` in Chromium. Every schedule of the library must have the facts and the drawing
           of this process. Requests to other hosts; bytes before the first drawing, and seconds until it.
adapters   the tests of `schedc_runtime.trainers`: training, saving and resuming on real processes.

`--cases` asks for another number of cases, where a word draws them.

Printed: `cases`, `failed`, the word's own figures, and seconds of processor time. Latencies are wall times of a request
and its answer on this machine, in ms. The exit status is 1 if a case failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from figures import run_word

sys.path += [str(Path(__file__).parents[1] / name) for name in ("tests", "docs")]

WORDS = {
    "adapters": "support.door_cases:adapters",
    "compare": "support.door_cases:compared_rows",
    "editor": "support.editor_cases:editor",
    "fixes": "support.door_cases:fixes",
    "playground": "support.playground_page:playground",
    "sarif": "support.sarif_cases:sarif",
    "schemas": "support.mutated_outputs:schemas",
    "site": "support.built_site:site",
}

if __name__ == "__main__":
    run_word(__doc__, WORDS)
