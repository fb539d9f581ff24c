"""Explains the codes of family S4: costs in time and memory, given by options and cost files."""

from __future__ import annotations

from schedc.codes.base import DiagnosticCode

S4: tuple[DiagnosticCode, ...] = (
    DiagnosticCode(
        "S401",
        "an unknown cost",
        "A cost is a time, such as F, FB (an overlapped pair) or p2p (the latency of a message), or memory, such as "
        "activation. It is given as `--cost F=1.5`, or in a file with `--cost-file`: times in its table [ops], memory "
        "in its table [memory]. `schedc check --help` lists all costs; docs/guide/costs.md says what each means.",
    ),
    DiagnosticCode(
        "S402",
        "a cost that is no legal value",
        "A cost is a number from 0 to 1e15, or one such number per stage: `--cost F=1,1,1,2`, or a list in a file. "
        "Negative numbers, NaN and infinity are refused because they give no meaningful timeline. p2p is one number: "
        "the latency is the same for every message.",
    ),
    DiagnosticCode(
        "S403",
        "a cost option that is not KEY=VALUE",
        "Write `--cost F=1 --cost p2p=0.05`: one option per cost, a name, an equals sign and a number.",
    ),
    DiagnosticCode(
        "S404",
        "a list of costs that does not fit the number of stages",
        "A list has one cost per stage. The number of stages follows from the schedule and its sizes: a schedule "
        "with v chunks per rank has v * P. Costs that were measured at one size do not fit another.",
    ),
    DiagnosticCode(
        "S405",
        "a cost file that cannot be used",
        'A cost file is a TOML text with schema = "schedc.costs/1". The message says whether it cannot be read, is '
        "not TOML, or does not name that schema. `docs/guide/costs.md` has an example.",
    ),
    DiagnosticCode(
        "S406",
        "layers that do not fit into the memory of a rank",
        "No layout keeps every rank within the memory that was given to `schedc layout --limit`, or the layers of a "
        "plan do not fit into its `memory`. The memory of a rank is the sum of the parameters of its parts, the slots "
        "of hot experts, and the activations at its peak, including those that wait for their weight gradients. If "
        "recomputation is `adaptive`, these are the activations under the worst routing. The message names the least "
        "memory that suffices, and what fills the fullest rank; for a plan also the op at its peak. Another schedule, "
        "or more ranks, holds fewer microbatches; `recompute` holds less of each.",
        wrong="plan a = 1f1b(P = 2, M = 4) {\n  layers 4\n  memory 3\n}\n",
        right="plan a = 1f1b(P = 2, M = 4) {\n  layers 4\n  memory 4\n}\n",
    ),
    DiagnosticCode(
        "S407",
        "no order within a cap on memory",
        "No order keeps every rank within the cap that was given to `schedc tune --memory`, or none was found. Before "
        "the first backward of a microbatch on a rank, its forwards have run through all chunks of the rank. So a "
        "rank needs at least the memory of these activations together. Running one microbatch after another needs no "
        "more. If the search is restricted (pairs that are kept, a sequence of microbatches), more may be needed. The "
        "message names a memory that suffices.",
    ),
    DiagnosticCode(
        "S408",
        "too many ops to search their order",
        "`schedc tune` builds a model with a variable for every op, and more for memory. It takes at most 8,000 "
        "ops (a backward that may be split counts as two), and is at its best with some hundreds.",
    ),
    DiagnosticCode(
        "S409",
        "an order with recomputations is not searched",
        "`schedc tune` moves F, B, I and W. The best place of each R depends on where its rank then waits. Tune the "
        "order without Rs, and let `recompute ... in bubbles` of a plan place them.",
    ),
    DiagnosticCode(
        "S410",
        "costs that leave out a time that is asked for",
        "A cost file that gives F or B has its own unit, such as milliseconds. The default of 1 for a missing time "
        "has no meaning in this unit. So the file must give the times of all ops of the schedule: F, I and W; and B, "
        "which is I + W if it is not given. R is F if it is not given. For example, costs that were traced on whole "
        "backwards cannot price a schedule that splits them: measure with `schedc calibrate`, or add `--cost I=... "
        "--cost W=...`. A file without F and B only changes single defaults, and may be one line. `--replicas` "
        "needs the time `dp`, too, and the parameters of a plan: nothing else says how long sums of gradients take.",
    ),
    DiagnosticCode(
        "S411",
        "times of parts beside other times, or without a plan",
        "The table [parts] of a cost file gives the times of the parts of a model: of an embedding, a layer, a head. "
        "F, I, W and B of a stage follow from the parts that a plan's layout puts into it. So nothing else may give "
        "them: neither [ops], nor `--cost`, nor the line `costs` of the plan. A schedule without a plan has no "
        "layers, and its stages have no parts: give F, I and W in [ops] instead.",
    ),
    DiagnosticCode(
        "S412",
        "factors of microbatches that do not fit",
        "`microbatches` has a factor for each microbatch: its ops take as many times as long as the costs say. It is a "
        "list of numbers from 0 to 1e15, or a list of such lists, one per stage. A schedule that cuts these into "
        "segments has a factor for each segment: number m k + j is segment j of microbatch m. Factors that were "
        "measured at one number of microbatches do not fit another. `schedc check --rows` makes factors of the costs "
        "of rows. Negative numbers, NaN and infinity are refused because they give no meaningful timeline.",
    ),
    DiagnosticCode(
        "S413",
        "memory that holds at the mean rows alone",
        "`schedc check` prints this warning for a plan with a `memory` in bytes, and `balance` or bounded sizes. A "
        "rank fits with the mean rows of experts, but a router may send it more. That is R min(k, E / R) rows of a "
        "token over R ranks. Where copies last for a step it may be k (R - 1), if that is more. A step that overflows "
        "its bounded sizes runs again, and may have as many. With copies by microbatch it is x times the rows of a "
        "node. The figure takes every microbatch in flight for the worst. Adaptive recomputation counts the worst "
        "routing in `memory` itself, and S406 then refuses the plan. With `--replicas` there is no warning.",
    ),
    DiagnosticCode(
        "S414",
        "memory that holds without gathered rows alone",
        "`schedc check` prints this warning for a plan with a `memory` in bytes, and `parallel` with tp or cp above 1. "
        "The memory of a plan counts a rank's own rows, as Megatron-LM keeps them. This runtime keeps inputs of cores, "
        "keys and values as they were gathered, until the backward. A rank fits without them, and not with them. "
        "`recompute layer` gathers inputs of cores again, and keeps own rows. With `--replicas` there is no warning.",
    ),
    DiagnosticCode(
        "S415",
        "pairs to make under costs that differ by microbatch",
        "`schedc tune --pairs make` compares every pair with its two ops by their stages. With `microbatches` in the "
        "costs a pair also differs by its two microbatches, and no bound for all pairs is known. Search with the mean "
        "costs, or keep the pairs: `--pairs keep`.",
    ),
)
