"""Codes of family S3: messages between ranks, deadlock, and the files that programs are kept in."""

from __future__ import annotations

from schedc.codes.base import DiagnosticCode


def _file(body: str) -> str:
    return f"""sched 1
schedule example(P: ranks = 2, M: microbatches = 4) {{
  require P == 2
  place linear
  rank r {{
{body}
  }}
}}
"""


def _cell(lane: str) -> str:
    return f"""sched 1
plan example = dualpipev(P = 2, M = 4) {{
  layers 8 dense 4
  experts 16 top 2
  overlap auto
  cell F & B {{ {lane} }}
}}
"""


_PROGRAM = "Raised when a program is loaded that was edited or made by another tool; never by what schedc compiles."

S3: tuple[DiagnosticCode, ...] = (
    DiagnosticCode(
        "S301",
        "deadlock: ranks wait for each other in a circle",
        "A rank runs its ops in order and waits at each for what other ranks compute for it. If rank 0 waits for an "
        "op of rank 1 that stands behind one for which rank 1 waits for rank 0, neither goes on. The message shows the "
        "shortest such circle, each rank with the op at which it stands and the op that it needs. In the example rank "
        "0 wants the gradient of microbatch 0 before it gives away microbatch 1, and rank 1 wants all microbatches "
        "before it gives away a gradient.",
        wrong=_file(
            "    phase one   repeat M * (r == 0) { F  B }\n"
            "    phase all   repeat M * (r == 1) { F }\n"
            "    phase drain repeat M * (r == 1) { B }"
        ),
        right=_file("    phase all   repeat M { F }\n    phase drain repeat M { B }"),
    ),
    DiagnosticCode(
        "S302",
        "a stage has more than two copies",
        "Every pipe of a schedule has its own copy of every stage, and the weight gradients of the copies are summed "
        "at the end of a step, between two ranks. There is no reduction among three or more. A `.sched` file has at "
        "most two pipes, so that this comes from an imported order.",
    ),
    DiagnosticCode(
        "S310",
        "a program comes to a standstill",
        "The program was run under the strictest rules that a transport may have: a message completes when both ends "
        "have posted it, each rank's messages complete in the order of its posts, and a rank stands only at WAIT and "
        "REDUCE. Some ranks then stand for ever; the notes show the shortest circle of what waits for what. "
        + _PROGRAM,
    ),
    DiagnosticCode(
        "S311",
        "a message does not have one SEND and one RECV",
        "The number of a message occurs in exactly one SEND and one RECV of the whole program. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S312",
        "the two ends of a message do not agree",
        "SEND and RECV of one message name each other's rank, and the same channel, stage and microbatch. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S313",
        "messages are received in another order than they are sent",
        "Transports need not look at tags (NCCL does not): from one rank to another, the k-th RECV takes what the "
        "k-th SEND gave. In another order, microbatches would be exchanged silently. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S314",
        "a batch is not the same at both ends",
        "Instructions with one batch number are posted by one call: they are neighbours, have one peer, and their "
        "other ends form a batch too. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S315",
        "a posted message is not waited for exactly once",
        "Every SEND and RECV has one WAIT on its rank, behind it, with the same peer, channel, stage, microbatch "
        "and op. A message never waited for keeps its buffer; one waited for twice has none the second time. "
        + _PROGRAM,
    ),
    DiagnosticCode(
        "S316",
        "the messages are not those that the computation needs",
        "There is one message for each activation and each gradient that one rank produces and another consumes, "
        "from the one to the other, and no other message. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S317",
        "a value is sent before it is computed, or used before it has arrived",
        "A SEND stands behind the instruction that computes its value, and the WAIT of a RECV before the one that "
        "consumes it. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S318",
        "the copies of a stage are not summed as they should",
        "With two pipes, each stage whose two copies live on two ranks has one REDUCE on both, behind its last weight "
        "gradient, and two ranks sum their stages in one order. No other stage has any. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S319",
        "an instruction has a field that it cannot have",
        "Every field that applies to a kind of instruction is in its range, every other one is -1, and `op` names "
        "the cell of the rank that the instruction serves. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S320",
        "the program of a cell does not do its work as it should",
        "In a cell every segment of its halves runs once, every exchange is started once and waited for once, nothing "
        "begins before all that it takes is complete, and outputs leave no sooner than they are complete. Raised for "
        "cell programs that were edited or made by another tool; never for those that schedc makes.",
    ),
    DiagnosticCode(
        "S321",
        "the ranks of a communicator do not start the same collectives",
        "A collective needs all ranks of its communicator, and the k-th of one rank meets the k-th of the others: in "
        "another order they would hang, or exchange each other's rows. The message names the first place where two "
        "replicas differ, with the cell and the instruction of both. All ranks of a group run one "
        "cell program; it comes about where they were compiled from other costs, or edited.",
    ),
    DiagnosticCode(
        "S322",
        "replicas wait for each other's collectives for ever",
        "The collectives were run under the strictest rules: those of a rank go on one at a time in the order in "
        "which it starts them, whatever their communicator, and each is complete when it is the turn of all of its "
        "members. If that ends, it is run with the messages between pipeline ranks in the same lines. Two "
        "communicators started in another order on two ranks hang in practice too, where both need the same links or "
        "the same cores. Like S321 it comes about where the ranks of a group run other cell programs.",
    ),
    DiagnosticCode(
        "S323",
        "the order of a cell cannot run",
        "The order by hand of a plan's cell names segments (compute) and exchanges (communication) of a forward and a "
        "backward layer, as F.attention, B.experts.I, B.experts.W, F.dispatch. Each lane runs strictly in that order. "
        "It cannot if a name is unknown or stands twice, or if a part stands before one that it needs: the message "
        "then lists what waits for each other.",
        wrong=_cell("compute F.post F.mlp F.attention"),
        right=_cell("compute F.attention F.mlp F.post"),
    ),
    DiagnosticCode(
        "S390",
        "the text form of a schedule or program cannot be read",
        "The text form is written by `schedc export --to text` and `--to program`. It may be edited; the message "
        "points at what is not part of the form. Comments are lines that begin with #.",
    ),
    DiagnosticCode(
        "S391",
        "the JSON form of a program cannot be read",
        "The message names the place as a path, such as streams[2].peer[17]: rank 2, field peer, instruction 17. All "
        "fields are required, none may be added, and every number is an integer in the range of its field.",
    ),
    DiagnosticCode(
        "S393",
        "the columns of a program cannot be read",
        "Columns are written by `schedc compile --format npz`. The message names the member of the archive, and the "
        "row where one value is wrong: peer[17]. The file may be damaged, cut short, or no program. One that would "
        "expand out of proportion to its size is refused before it is unpacked. Compile the schedule again, or copy "
        "the file again in binary mode.",
    ),
    DiagnosticCode(
        "S392",
        "a file has another form or version than this schedc reads",
        "A text form begins with `schedule 1` or `program 1`; the JSON form has the schema schedc.program and the "
        "version 1, and columns the schema schedc.columns and the version 1. The number grows when the meaning of a "
        "form changes, so that an older reader never takes one for the other. Compile the schedule again.",
    ),
)
