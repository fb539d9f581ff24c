"""Explains the codes of family S3: messages between ranks, deadlock, and the files of programs."""

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
        "A rank runs its ops in order, and each op waits for its inputs from other ranks. Suppose rank 0 waits for an "
        "op of rank 1. If rank 1 first waits for rank 0, neither goes on. The message shows the shortest such circle: "
        "for each rank, the op that waits and the op that it needs. In the example, rank 0 needs the gradient of "
        "microbatch 0 before it sends microbatch 1, and rank 1 needs all microbatches before it sends a gradient.",
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
        "Every pipe of a schedule has its own copy of every stage. At the end of a step, two ranks sum the weight "
        "gradients of two copies. A sum over three or more copies is not supported. A `.sched` file has at most two "
        "pipes, so the order was imported.",
    ),
    DiagnosticCode(
        "S303",
        "tied weights that cannot be summed",
        "Stages that use the same parameters are tied. Each of their ranks holds a copy, and two ranks at a time "
        "exchange gradients at the end of a step. A tie names two or more stages of the schedule, ascending. With "
        "two pipes, a stage has two copies of its own. Its tied stages then have to share both ranks.",
    ),
    DiagnosticCode(
        "S310",
        "a program deadlocks",
        "The program was simulated under the strictest rules that a transport may have. A message completes when both "
        "ends have posted it. The messages of a rank complete in the order of its posts, and a rank blocks only at "
        "WAIT and REDUCE. Some ranks then deadlock. The notes show the shortest circle of instructions that wait. "
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
        "Transports need not look at tags (NCCL does not): from one rank to another, the k-th RECV receives what the "
        "k-th SEND sent. In another order, microbatches would be mixed up silently. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S314",
        "a batch is not the same at both ends",
        "Instructions with the same batch number are posted by one call. They are neighbours and have the same peer, "
        "and their other ends form a batch, too. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S315",
        "a posted message is not waited for exactly once",
        "Every SEND and RECV has one WAIT after it on its rank, with the same peer, channel, stage, microbatch and "
        "op. A message without a WAIT keeps its buffer; at a second WAIT the buffer is gone. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S316",
        "the messages are not those that the computation needs",
        "Each activation and each gradient that one rank produces and another consumes is one message from the one to "
        "the other. The program has no other messages. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S317",
        "a value is sent before it is computed, or used before it has arrived",
        "A SEND comes after the instruction that computes its value. The WAIT of a RECV comes before the instruction "
        "that consumes the value. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S318",
        "the copies of a stage are not summed as they should",
        "With two pipes, a stage whose two copies are on different ranks has one REDUCE on both, after its last "
        "weight gradient. Tied weights have one REDUCE for every two of their copies, after the "
        "last weight gradient of their stages. Two ranks sum in the same order. There is no other REDUCE. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S319",
        "an instruction has a field that it cannot have",
        "Every field that applies to a kind of instruction is in its range, and every other field is -1. `op` is the "
        "number, on its rank, of the op or pair that the instruction serves. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S320",
        "the program of a cell does not do its work as it should",
        "In a cell, every segment of its halves runs once, and every exchange is started once and waited for once. A "
        "step begins after all of its inputs are complete, and outputs are sent after they are complete. Raised for "
        "cell programs that were edited or made by another tool; never for those that schedc makes.",
    ),
    DiagnosticCode(
        "S321",
        "the ranks of a communicator do not start the same collectives",
        "A collective needs all ranks of its communicator. The k-th collective of one rank meets the k-th of the "
        "others: in different orders they would hang, or exchange wrong rows. The message names the first place where "
        "two replicas differ, with the cell and the instruction of both. All ranks of a group must run the same cell "
        "program. The cause is programs that were compiled from different costs, or edited.",
    ),
    DiagnosticCode(
        "S322",
        "the collectives of replicas deadlock",
        "The collectives were simulated under the strictest rules. The collectives of a rank proceed one at a time, "
        "in the order in which the rank starts them, whatever their communicator. A collective completes when it is "
        "next on all of its members. The simulation then also includes the messages between pipeline ranks. Two "
        "communicators that two ranks start in different orders can hang in practice, too, if both need the same "
        "links or the same cores. As for S321, the cause is a group whose ranks run different cell programs.",
    ),
    DiagnosticCode(
        "S323",
        "the order of a cell cannot run",
        "A plan's cell gives an order of segments (compute) and exchanges (communication) of a forward and a backward "
        "layer, such as F.attention, B.experts.I, B.experts.W, F.dispatch. Each lane runs strictly in this order. It "
        "cannot run if a name is unknown or is given twice, or if a part comes before another one that it needs. The "
        "message then lists the parts that wait for each other.",
        wrong=_cell("compute F.post F.mlp F.attention"),
        right=_cell("compute F.attention F.mlp F.post"),
    ),
    DiagnosticCode(
        "S324",
        "a program deadlocks on its communicators",
        "Each communicator is one queue on each of its ranks: messages complete in the order of their posts. The "
        "program was simulated with these queues, as for S310. Some ranks then deadlock. The notes "
        "show the shortest circle of instructions that wait. A receive that is posted early holds up what is posted "
        "behind it on the same communicator. The help names an assignment of communicators under which the program "
        "runs, if there is one. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S330",
        "the STARTs and JOINs of works do not match",
        "A work runs on a lane beside compute: d2h to the host, h2d back, dp among replicas. Every work has one "
        "START, and one JOIN behind. Both stand on a rank that holds the stage, and name the same stage and "
        "microbatch. What concerns a whole stage names no microbatch. "
        "Works are numbered in the order of their STARTs. A fetch moves the bytes of its offload, a drop those of its "
        "gather, and a spread those of its scatter. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S331",
        "a work or an op finds activations, parameters or gradients where they are not",
        "The activations of a microbatch on a stage are on the device from the forward on. An offload takes them to "
        "the host, and a fetch brings them back. No recomputation and no backward reads them in between, and no work "
        "moves what is not there. The parameters of a stage with gathers are whole from the JOIN of a gather to the "
        "START of a drop. Every op of the stage stands in between. A gradient is scattered behind the last weight "
        "gradient of its stage, then spread. " + _PROGRAM,
    ),
    DiagnosticCode(
        "S390",
        "the text form of a schedule or program cannot be read",
        "`schedc export --to text` and `--to program` write the text form. It may be edited. The message points at "
        "the part that is not legal. Comments are lines that begin with #.",
    ),
    DiagnosticCode(
        "S391",
        "the JSON form of a program cannot be read",
        "The message names the place as a path, such as streams[2].peer[17]: rank 2, field peer, instruction 17. All "
        "fields are required, no others are legal, and every number is an integer in the range of its field.",
    ),
    DiagnosticCode(
        "S393",
        "the columns of a program cannot be read",
        "`schedc compile --format npz` writes columns. The message names the member of the archive, and the row if "
        "one value is wrong: peer[17]. The file may be damaged, cut short, or not a program. A file that would expand "
        "out of proportion to its size is refused before it is unpacked. Compile the schedule again, or copy the file "
        "again in binary mode.",
    ),
    DiagnosticCode(
        "S392",
        "a file has another form or version than this schedc reads",
        "A text form begins with `schedule 1` or `program 1`; the JSON form has the schema schedc.program and the "
        "version 3, and columns the schema schedc.columns and the version 3; their versions 1 and 2 are read, too. The "
        "version grows when the meaning of a form changes, so an older reader never misreads a newer file. Compile "
        "the schedule again.",
    ),
)
