"""Explains the codes of family S6: formats of other tools, written and read."""

from __future__ import annotations

from schedc.codes.base import DiagnosticCode

S6: tuple[DiagnosticCode, ...] = (
    DiagnosticCode(
        "S601",
        "not an op of torch's schedule CSV",
        "A schedule CSV has one line per rank and, between commas, ops such as 0F3, 5I2, 5W2, 2B1, or an overlapped "
        "pair (3F4;2B1)OVERLAP_F_B: stage, letter, microbatch, both numbers from 0. A lowered file also has messages "
        "(0SEND_F3, 1RECV_F3, 1SEND_B3, 0RECV_B3) and what concerns whole stages (0UNSHARD, 0RESHARD, "
        "0REDUCE_GRAD). Raised when such a file is read.",
    ),
    DiagnosticCode(
        "S602",
        "a schedule CSV does not say where each stage lives",
        "The CSV format names no placement and no sizes. They follow from the forwards: stage s of microbatch m is on "
        "the rank that runs its forward, and the largest numbers say how many there are. Nothing follows if a forward "
        "is missing, if numbers are skipped, or if one forward of a stage is on another rank than the others. Raised "
        "when such a file is read.",
    ),
    DiagnosticCode(
        "S603",
        "a target has one direction only",
        "DualPipe and Chimera send microbatches through the ranks in both directions, with a copy of every stage for "
        "each direction. So a stage is on two ranks. torch.distributed.pipelining and Megatron know one rank per "
        "stage, and do not sum copies. Raised by `schedc export`; `--to csv` still writes such an order in torch's "
        "notation, as a record: torch itself refuses to load it.",
    ),
    DiagnosticCode(
        "S604",
        "a message of a lowered schedule CSV does not fit the computation",
        "Every value that one rank computes and another needs is sent once and received once. The SEND follows the op "
        "that computes the value, and the RECV precedes the op that needs it. An activation has 0SEND_F3, 1RECV_F3, a "
        "gradient 1SEND_B3, 0RECV_B3. Stages on one rank hand over values without messages. Raised when a lowered "
        "file is read.",
    ),
    DiagnosticCode(
        "S605",
        "parameters or gradients of a stage are not there in a lowered schedule CSV",
        "REDUCE_GRAD comes once after the last weight gradient of each stage; earlier, it would leave microbatches "
        "out of the gradient. If a file has UNSHARD and RESHARD, a stage computes between the two. Raised when a "
        "lowered file is read.",
    ),
    DiagnosticCode(
        "S606",
        "an order is one for its own size only",
        "A .sched file describes a schedule at every size. A CSV or text form is the order of one size. -D cannot "
        "change it, and no formula follows from it. Raised if such a file is given with other sizes, or to `report` "
        "and `check --sweep`.",
    ),
    DiagnosticCode(
        "S607",
        "another trainer cannot run this schedule",
        "Megatron makes its orders itself: 1F1B, interleaved 1F1B, and the latter with overlapped pairs. With a "
        "pipeline it shards the optimizer's state at most (`zero 1`). torchtitan "
        "and NeMo AutoModel place stages round robin or on a V, on two or more ranks. None of them has segments of a "
        "sequence. The message says where the schedule differs and which one is nearest. Raised by `schedc export`.",
    ),
    DiagnosticCode(
        "S608",
        "a dependency graph is too large for a picture",
        "`schedc show --graph` and `schedc export --to dot` are for small cases: at most 600 cells of a schedule, or "
        "segments and exchanges of a stage. Raised by these commands.",
    ),
    DiagnosticCode(
        "S609",
        "a target has no recomputation of its own",
        "R is an op of the schedule: it recomputes what the forward did not keep, at the place that the schedule "
        "gives. torch.distributed.pipelining and Megatron recompute inside of the backward, as the modules decide, "
        "and have no op for it. Raised by `schedc export`; `schedc compile` leaves out its schedule.csv.",
    ),
    DiagnosticCode(
        "S610",
        "a trace of another schedule",
        "`schedc show --trace` draws a run above its prediction, cell by cell. The run must have had the same ranks, "
        "the same ops and pairs on each, and the same order. The trace names schedule and sizes. Sizes of -D "
        "go first. A policy orders by the costs with which the program was compiled.",
    ),
    DiagnosticCode(
        "S611",
        "not the trace of a run",
        "`schedc run SCHEDULE --trace FILE` writes a trace in the Trace Event Format (JSON object form). It has a "
        "process per rank and a slice per instruction, named 0F3 or (0F3;3B1)OVERLAP_F_B. `schedc export --to trace` "
        "writes a predicted timeline in the same format, which contains no measurement. Raised by `schedc show "
        "--trace`.",
    ),
    DiagnosticCode(
        "S612",
        "a PNG has too many pixels",
        "A PNG has one pixel per px of the drawing: at most 100 million pixels, and 32,767 on a side. SVG and PDF "
        "have no such limit. Raised by `schedc show` and `schedc watch`, for wide drawings of many ranks.",
    ),
    DiagnosticCode(
        "S613",
        "a target has no copies to host memory",
        "`offload` in a plan moves activations to host memory and back beside the compute, so that ranks keep within "
        "`memory`. Schedules of other trainers have no such instructions, and their ranks would hold more. Raised by "
        "`schedc export`; `schedc compile` leaves out its schedule.csv.",
    ),
    DiagnosticCode(
        "S614",
        "a target has no flag for a line of a plan",
        "Lines of a plan such as `hot`, `slices`, `cell` or `fuse` say how this project's runtime runs a layer. "
        "Megatron has no flag for them, so its steps would differ from the plan's in time or memory. Sizes, experts, "
        "exchanges, levels, parallel groups and the batch have flags. Raised by `schedc export --to megatron`.",
    ),
    DiagnosticCode(
        "S615",
        "a target has no pairs with a weight gradient",
        "`F & W` and `I & W` run the weight gradients of an older microbatch beside another op, so that they fill its "
        "waits. Schedules of torch.distributed.pipelining and Megatron overlap a forward with a backward alone; there "
        "the two ops would run one after the other. Raised by `schedc export`; `schedc compile` leaves out its "
        "schedule.csv.",
    ),
    DiagnosticCode(
        "S616",
        "not a trace to diagnose",
        "`schedc diagnose` replays steps microbatch by microbatch. It reads files of `schedc run --trace`, a step "
        "each, and files of torch.profiler, a rank each. These must name microbatches: `PP:0F3` as torch's multi-stage "
        "schedules do, or `Forward 3` and `Backward 3`. Megatron's ranges name none. The help says what to record "
        "instead. Files above 512 MiB unpacked are refused before they are parsed.",
    ),
    DiagnosticCode(
        "S617",
        "traces that do not fit together, or are of another program",
        "Every rank must have run the same steps, and the ops of all ranks must be one legal schedule. With --program "
        "they must be that schedule, cell by cell. Raised by `schedc diagnose`.",
    ),
    DiagnosticCode(
        "S618",
        "clocks contradict messages",
        "A cell cannot begin more than 1 ms before what it waits for was sent. Ranks of several hosts need clocks that "
        "agree. Raised by `schedc diagnose`.",
    ),
    DiagnosticCode(
        "S619",
        "a question that a trace does not answer",
        "`schedc diagnose --what-if` knows ranks, kinds of ops, stages and links of the trace, and sizes of schedules. "
        "Raised for a name that is none of these.",
    ),
)
