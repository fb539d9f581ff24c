#!/usr/bin/env bash
# Plans a toy model with experts for four local processes: measure, fit, search, run the best plan and the fourth, emulate four.
#
#     bash examples/plan_local.sh [OUT]
#
# OUT is a new folder, by default build/plan_local. Needs the extras runtime and plan. Exit status 1: gradients differ
# from those of the serial reference, or an emulated pipeline is more than 5 % from its prediction.
# BATCH=8x32 TRAINED=01 EMULATED=1 in the environment plans for a quarter of the sequences, and trains and emulates the
# best plan alone: quicker.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${1:-$root/build/plan_local}
batch=${BATCH:-32x32} trained=${TRAINED:-01 04} emulated=${EMULATED:-4}
if [ -e "$out" ]; then
  echo "$out is there already: give another folder" >&2
  exit 2
fi
# Programs of the environment that `make` sets up, else those of the path; BIN names another environment.
bin=${BIN:-$root/.venv/bin}
[ -x "$bin/schedc" ] && PATH=$bin:$PATH
mkdir -p "$(dirname "$out")"
cp -r "$root/examples/plan_local" "$out"
cd "$out"

echo "== measure segments, exchanges and messages on this machine"
schedc calibrate measured.sched -o costs.toml
echo "== fit the constants of the cost model to them"
schedc fit rows.csv -o local.fit.toml
echo "== search plans that the runtime carries out, of two stages and more"
schedc plan model.toml cluster.toml --fit local.fit.toml --batch "$batch" --top 4 -o plans \
  --require 'pp >= 2 and tp == 1 and cp == 1 and zero == 1 and microbatch == 2 and alltoall == flat and recompute == none'
for plan in $trained; do
  echo "== train with plan $plan, and compare every gradient bit by bit"
  schedc run plans/$plan.sched --cost-file plans/$plan.costs.toml --check bitwise --steps 2
done
echo "== predicted and emulated seconds"
python "$root/benchmarks/planned.py" plans model.toml cluster.toml --fit local.fit.toml --top "$emulated"
