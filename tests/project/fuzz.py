"""Fuzzing of everything that schedc reads: only a `DiagnosticError` may come out, in time and within memory.

    python tests/project/fuzz.py --count 100000 [--seed 1] [--family plans] [--only NUMBER]

Every input goes through all stages that it reaches: reading, checks, elaboration, legality, timeline, memory, claims,
messages, drawing, and the forms that are written. A fault is any other exception, a diagnostic that cannot be shown or
explained, or `SECONDS` of CPU time in each of three tries. What a legal schedule may cost is bounded, so that
the time of an input says something. The limits below bound ops, work of an evaluation and searches of cells; the limit
of the process bounds memory.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from project.fuzz_inputs import FAMILIES, Case, case
from project.fuzz_readers import READERS, code_of
from schedc.compiler import compile_at
from schedc.diagnostics import DiagnosticError

SECONDS = 2.0
_TRIES = 3
MEMORY = 4 << 30
MOST_OPS, MOST_WORK = 20_000, 5_000_000


class Hang(BaseException):
    """An input took too long."""


@contextmanager
def uncounted_compiling() -> Iterator[None]:
    """Stops the clock of an input while numba compiles, which is done once and belongs to no input.

    A `Hang` inside of it would be lost in a callback of LLVM.
    """
    if find_spec("numba") is None:
        yield
        return
    from numba.core import event

    class Compiling(event.Listener):  # type: ignore[misc, name-defined, unused-ignore]
        depth, left = 0, 0.0

        def on_start(self, event: object) -> None:
            if self.depth == 0:
                self.left = signal.setitimer(signal.ITIMER_PROF, 0)[0]
            self.depth += 1

        def on_end(self, event: object) -> None:
            self.depth -= 1
            if self.depth == 0 and self.left:
                signal.setitimer(signal.ITIMER_PROF, self.left)

    with event.install_listener("numba:compiler_lock", Compiling()):
        yield


def outcome(given: Case) -> str:
    """``ran``, or the code with which an input was refused; raises whatever is a fault."""
    try:
        return READERS[given.reader](given)
    except DiagnosticError as error:
        return code_of(error.diagnostics)


def _stop(_number: int, frame: FrameType | None) -> None:
    """Ends the input. What a callback of the garbage collector raises is lost, so that it is asked again behind one."""
    if frame is not None and frame.f_code.co_name == "gc_callback":
        signal.setitimer(signal.ITIMER_PROF, 0.01)
        return
    raise Hang


LIMITS = {
    "MAX_OPS": MOST_OPS,
    "MAX_COMPUTED": MOST_OPS // 10,
    "MAX_WORK": MOST_WORK,
    "VARIED": 10,
    "TRIES_PER_TASK": 15,
}


def limits() -> list[tuple[ModuleType, str]]:
    """The limits of the compiler on work that is legal, with the modules that hold them."""
    modules = [module for name, module in sys.modules.items() if name.startswith(("schedc.elaborate.", "schedc.cell."))]
    return [(module, limit) for module in modules for limit in LIMITS if hasattr(module, limit)]


def bounded() -> None:
    """Lowers them in this process."""
    for module, limit in limits():
        setattr(module, limit, LIMITS[limit])


def fuzz(count: int, seed: int, tell: Callable[[str], None], first: int = 0, only: str = "") -> list[int]:
    """Runs so many inputs; tells of each fault and in the end what was run. Gives the numbers of the faults."""
    signal.signal(signal.SIGPROF, _stop)
    seen: dict[str, Counter[str]] = {family: Counter() for family in FAMILIES}
    faults: list[int] = []
    slowest = (0.0, -1)
    start = time.perf_counter()
    for number in range(first, first + count):
        family, given = case(seed, number, only)
        begin = time.process_time()
        with uncounted_compiling():
            what, error = timed(given)
        if error is not None:
            faults.append(number)
            tell(report(number, family, given, error))
        slowest = max(slowest, (time.process_time() - begin, number))
        seen[family][what] += 1
        if (number + 1) % 10_000 == 0:
            tell(f"{number + 1} inputs, {len(faults)} faults, {time.perf_counter() - start:.0f} s")
    for family, results in seen.items():
        total = sum(results.values())
        common = ", ".join(f"{code} {n}" for code, n in results.most_common(6))
        tell(f"{family:<22} {total:>7} inputs, {results['ran']:>6} ran; {common}")
    tell(f"slowest: input {slowest[1]} with {slowest[0]:.2f} s of CPU time")
    tell(f"{count} inputs of seed {seed}: {len(faults)} faults")
    return faults


def timed(given: Case) -> tuple[str, BaseException | None]:
    """The outcome, and what is a fault. A machine that is busy stretches time: only what is too slow thrice hangs."""
    error: BaseException | None = None
    for _ in range(_TRIES):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            return outcome(given), None
        except Hang as hang:
            error = hang
        except (Exception, RecursionError) as fault:
            return f"FAULT {type(fault).__name__}", fault
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return "FAULT Hang", error


def report(number: int, family: str, given: Case, error: BaseException) -> str:
    place = "".join(traceback.format_exception(error)[-6:])
    text = given.text if len(given.text) < 4000 else f"{given.text[:4000]}…"
    extra = f" sizes {dict(given.sizes)} options {given.options}"
    return f"--- fault at input {number} ({family}){extra}\n{text}\n{place}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--family", default="", choices=("", *FAMILIES), help="inputs of this family alone")
    parser.add_argument("--only", type=int, help="run a single input, shown before the run")
    arguments = parser.parse_args()
    compile_at("dualpipev", {"P": 32, "M": 2048})  # what is compiled once (numba) belongs to no input
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    faulthandler.enable()
    bounded()
    if arguments.only is not None:
        family, given = case(arguments.seed, arguments.only, arguments.family)
        print(f"{family}, {given.reader}, {dict(given.sizes)}, {given.options}\n{given.text}", flush=True)
        print(fuzz(1, arguments.seed, print, arguments.only, arguments.family) or "no fault")
        return
    tell = functools.partial(print, flush=True)
    faults = fuzz(arguments.count, arguments.seed, tell, arguments.first, arguments.family)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
