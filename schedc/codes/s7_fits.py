"""Explains the codes of family S7 that `schedc fit` raises: files of measured steps, and fits."""

from __future__ import annotations

from functools import partial

from schedc.codes.base import DiagnosticCode

_HEAD = "model,layers,hidden,heads,seq,cluster,microbatch,batch,dp,step_s,tokens_per_s_per_device\n"
_ROW = "GPT-1B,24,2048,16,1024,cluster.toml,4,64,8,0.8,10240\n"
_rows = partial(DiagnosticCode, file="rows.csv", right=_HEAD + _ROW)

S7_FITS: tuple[DiagnosticCode, ...] = (
    _rows(
        "S720",
        "a file of measured steps that cannot be used",
        "Measured steps are a CSV text in UTF-8 of at most 1 MB: a head with the names of columns, and a row for each "
        "training run. Raised for other texts, for files without rows, and where `--only` leaves none.",
        wrong=_HEAD,
    ),
    _rows(
        "S721",
        "columns that are missing or unknown",
        "A row needs the sizes of the model, the file of its cluster, a microbatch, a batch, and a measurement. The "
        "name of a column says its unit: `step_s` is in seconds. A column with another name is refused, because a "
        "figure in another unit would be fitted as it stands. docs/guide/fitting.md lists all columns.",
        wrong=_HEAD.replace("step_s", "step_ms") + _ROW,
    ),
    _rows(
        "S722",
        "a cell that is missing, or no value of its column",
        "Sizes are whole numbers, measurements are numbers without a unit, and yes and no are 1 and 0. A cell may be "
        "empty where the column has a default.",
        wrong=_HEAD + _ROW.replace("0.8", "800 ms"),
    ),
    _rows(
        "S723",
        "a row that contradicts itself",
        "tp*pp*dp*cp are the devices; dp and the microbatch divide the batch; the schedule takes the sizes; the step "
        "time and the tokens per second agree within 2 %; a calibration has as many stages as the row; no step is "
        "about a thousand times off what most rows say, which is another unit. A row that "
        "fails this has a slip somewhere, and no fit can tell where. Correct it, or write the reason in the column "
        "`left_out`; reasons are printed.",
        wrong=_HEAD + _ROW.replace("10240", "12000"),
    ),
    _rows(
        "S724",
        "a row that stands twice",
        "Two rows have the same run and the same measurement. Counted twice they would weigh twice. A second "
        "measurement of the same run is another row, and welcome.",
        wrong=_HEAD + _ROW + _ROW,
    ),
    DiagnosticCode(
        "S725",
        "a fit that cannot be used",
        'A fit is a TOML text with schema = "schedc.fit/2", as `schedc fit` writes it: its name, the devices and '
        "precisions of its rows, constants in the tables `device`, `fabric` and `stack`, and `covariance`: a row for "
        "each constant, of the lower triangle whose product with its transpose is the covariance of their logarithms, "
        "in widths of the priors. Raised by `schedc plan predict` for other files.",
    ),
    DiagnosticCode(
        "S726",
        "a fit of another device or precision",
        "Constants hold for the device, the software and the precision that they were fitted on. A fit without a row "
        "of a device or a precision says nothing about it. `schedc plan predict --force-fit` goes on; every output "
        "then says so.",
    ),
)
