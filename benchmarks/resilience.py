"""What a run survives, and who is named: one word for each promise.

    python benchmarks/resilience.py WORD [--json] [--cases N] [--record FILE]

detect   one rank of four becomes slower: its rank and kind must be named, and quiet windows must raise no alarm.
         `resilience_detect.py` has the cases.
block    a state is copied into an image: at most 1.4 times the processor time of a copy of its bytes.
         `support.copy_costs` pairs both. A step with pieces of a state takes at most 1.03 of one without, and a step
         while the keeper writes at most 1.2, in processor time: `support.step_costs`.
kills    ranks kill themselves at every kind of instruction and at every part of a snapshot, sets of ranks do, and
         keepers are killed behind them: the training goes on each time. Flushes are killed at each of their calls.
         Nothing torn is loaded, nothing committed is lost, and the bits at the end are those of an undisturbed run. Two
         cores need half an hour; `--record` lets it be cut. `support.killed_runs` has the cases.
flips    bits of a committed checkpoint flip, files are cut, swapped or lost: each must be found in its file and
         piece, and the step before must be taken. Half of the damages are also given to two ranks that go on: they
         must say it, and have the bits of the step before. `support.damaged_checkpoints` has the cases.
full     the disk is full at 20 places of a save, or read-only: the save fails by its error, the step before stays
         as it is, and the next save works. `support.full_disks` makes such a disk.
hostile  altered checkpoints of every form: no code in them runs, no file outside of them is opened, and only errors of
         ours come out. `support.hostile_checkpoints` has the cases.
diagnose traces of our runtime with a known fault: `schedc diagnose` must put its cause first, and its gain may be a
         point off. `diagnosis.py` has the cases.
kineto   the same for traces of torch's schedules, one rank of which is slower.
named    one of four ranks under torchrun is killed, 40 times: each kill must be reported within a second, with the
         instruction. `support.named_kills` has the cases.
prove    a bit flips inside a stage of a rank: an audit must name the rank wherever it has sent other bits, and nobody
         where all ranks are healthy. `resilience_prove.py` has the cases.
resume   runs in 75 layouts go on from memory and from disk with the bits of runs that nothing stopped. Other layouts
         load the same states by name. `support.resumed_runs` has the cases.
peers    a node of four is lost, 200 times in one run: its ranks must come back from copies at the neighbour, with the
         bits that they had, and at most one snapshot may be lost. Two trainings under torchrun lose a node, too, and
         must end with the bits of an undisturbed run. `keeper_cpu_per_copy` is the processor time of keepers for a
         state, in plain copies of its bytes. `support.lost_nodes` and `support.lost_jobs` have the cases.
restart  40 trainings of four ranks under torchrun meet a fault: they must go on, and end with the bits of an
         undisturbed run. Then 12 jobs are ended by signals: the newest step must be on disk, and nothing may be left.
         `support.restarted_jobs` and `support.ended_jobs` have the cases.

`--cases` asks for fewer cases. `--record` keeps what has been done in a file, from which the next call goes on. Some
words take them.

Printed: `cases`, `failed`, the word's own figures, what failed, and seconds of processor time. The exit status is 1 if
a case failed. The tests run some of these cases.
"""

from __future__ import annotations

import sys
from pathlib import Path

from figures import run_word

sys.path.append(str(Path(__file__).parents[1] / "tests"))

WORDS = {
    "block": "support.copy_costs:block",
    "detect": "resilience_detect:detect",
    "diagnose": "diagnosis:own",
    "flips": "support.damaged_checkpoints:flips",
    "full": "support.full_disks:full",
    "hostile": "support.hostile_checkpoints:hostile",
    "kills": "support.killed_runs:kills",
    "kineto": "diagnosis:torch_schedules",
    "peers": "support.lost_nodes:peers",
    "named": "support.named_kills:named",
    "prove": "resilience_prove:prove",
    "resume": "support.resumed_runs:resume",
    "restart": "support.restarted_jobs:restart",
}
"""By word: the file, and the function that returns `cases`, `failed` and the word's own figures.

It may take `cases`, the number of cases, and `record`, the path of a file. Neither has to be given.
"""


if __name__ == "__main__":
    run_word(__doc__, WORDS)
