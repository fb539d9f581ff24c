"""An example of each command, as its help shows it: what stands behind ``schedc``."""

from __future__ import annotations

EXAMPLES = {
    "calibrate": "calibrate step.sched -o costs.toml",
    "check": "check zbh1 -D P=8 -D M=32 --cost W=0.5 --cost p2p=0.05",
    "checkpoint": "checkpoint verify checkpoints",
    "compare": "compare 1f1b zbv zb_wave -D P=8 -D M=32 --cost p2p=0.02 --memory 8",
    "compile": "compile dualpipev -D P=4 -D M=10 -o build/step",
    "diagnose": "diagnose trace.json --html diagnosis.html",
    "diff": "diff 1f1b zbh1 -D P=4 -D M=8 --cost W=0.5",
    "explain": "explain S301",
    "export": "export zbv -D P=4 -D M=8 --to csv -o zbv.csv",
    "fit": "fit rows.csv --cv",
    "fmt": "fmt --check mine.sched",
    "freeze": "freeze mine.sched -D P=4 -D M=8 --cost W=0.5",
    "frontier": "frontier -D P=8 -D M=32 -o frontier.html",
    "import": "import order.csv -o order.schedule",
    "layout": "layout --layers 30 --schedule zbv -D P=4",
    "list": "list",
    "lsp": "lsp",
    "partition": "partition models:make --example 'int64[2,32]'",
    "plan": "plan deepseek-v3 h800 -D devices=2048 --batch 4608x8192 -o plans",
    "plan compare": "plan compare plans/a.sched plans/b.sched",
    "plan list": "plan list",
    "plan predict": "plan predict rows.csv",
    "plan search": "plan search deepseek-v3 h800 -D devices=2048 --batch 4608x8192",
    "plan show": "plan show deepseek-v3",
    "prove": "prove audit --model models:make",
    "providers": "providers",
    "report": "report 1f1b",
    "run": "run dualpipev -D P=4 -D M=10 --check bitwise",
    "show": "show zbv -D P=4 -D M=8 -o zbv.svg",
    "torchrun": "torchrun --nproc-per-node 4 train.py",
    "tune": "tune 1f1b -D P=4 -D M=8 --split --time 10",
    "watch": "watch mine.sched",
}
"""By command. `schedc.cli` puts them in front of the exit statuses; a test reads each as its command does."""
