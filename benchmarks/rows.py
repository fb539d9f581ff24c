"""Rows of unequal cost: how evenly they are dealt, what their order gains, and whether samples and gradients stay.

    python benchmarks/rows.py order | sampler | losses | count | shapes | choose [--json]

Rows of 32,768 tokens are packed from drawn documents. Attention takes 0.8 of a row that is one document.

order: deals rows to replicas, and orders the microbatches of a pipeline.

    sums                  worst (fullest replica over the mean) / bound, where a replica has 8 rows or more
    few                   the same with 4 rows each
    positions             groupings with a smaller sum of largest costs, of all small ones and of drawn large ones
    ordered               step of ordered rows over the step as they come, mean of 20 steps, emulated
    predicted             largest |predicted / emulated - 1| of these steps

    Steps are those of `dualpipev`, P = 4, M = 16, in emulated device time: every op takes its microbatch's factor.

sampler: stops a run at each step of two windows, and goes on with other numbers of replicas and microbatches.
losses: trains one step of packed rows, rearranged, and each document alone; compares gradients.

count: runs steps of 8 to 12 microbatches through one pipeline, and through one pipeline each, on real ranks: the same
bits on all of them. `bound` counts streams that a rank binds, `bound_again` those of second steps.

shapes: runs steps whose microbatches have two and eight lengths, on real ranks. They have the bits of serial autograd,
and gradients within 1e-13 of padded steps. `sent` is the share of numbers in messages of those of padded steps.
`bound_again` counts streams bound, and recordings, in later steps of the same lengths in another order.

choose: chooses among four programs for drawn rows, P = 8 and M = 32, on V shapes and on one stage per rank. Then chosen
programs run on real ranks. `milliseconds` is the median compute time of a choice once loops are compiled, and `first`
that before: 10 is the most of both. `floor` is the mean step over its floor, none below 1. `gained` is the mean step
over that of the first program, ordered by as many tries. `bound_later` counts streams that later steps bind.

Printed: `cases`, `failed` (the number beside their limit), figures, and what failed. The exit status is 1 if a case
failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from figures import lines, parser_of

from support.chosen_cases import choose
from support.counted_cases import count
from support.row_cases import Judged, losses, order, sampler
from support.shape_cases import shapes

WORDS: dict[str, Callable[[], Judged]] = {
    "order": order, "sampler": sampler, "losses": losses, "count": count, "shapes": shapes, "choose": choose
}  # fmt: skip
"""By word: what runs, and gives the number of cases, what failed, and figures."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("word", choices=list(WORDS))
    options = parser.parse_args()
    cases, failures, figures = WORDS[options.word]()
    found = {"cases": cases, "failed": len(failures), **figures, "failures": failures}
    print(json.dumps(found) if options.json else "\n".join(lines(found)))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
