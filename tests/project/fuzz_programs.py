"""Programs of the language that the fuzzer makes by the grammar."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

_NAMES = ("P", "M", "v", "r", "i", "k", "x", "f", "F", "W", "bubble", "peak_activations", "min", "max", "abs", "é")
_PLACES = (
    ("linear", 1),
    ("linear", 1),
    ("v", 2),
    ("loop(2)", 2),
    ("loop(3)", 3),
    ("pipes { down(M//2): stage s on rank s  up(M - M//2): stage s on rank P-1-s }", 2),
    ("map(2*P) { stage s on rank s % P }", 2),
    ("map(P) { stage s on rank P-1-s }", 1),
)
_ODD_PLACES = ("loop(v)", "loop(P)", "loop(M)", "bidirectional", "pipes", "map(P)", "map(2*P) { stage s on rank s }")
_PARAMETERS = ("v: chunks = 2", "k: segments = 2", "x: count = 3", "x: count", "q: count = 0", "y: chunks = 1")
_ODD_PARAMETERS = ("q: ranks = 2", "P: ranks = 2", "v: chunks = 0", "z: nothing = 1", "k: segments = 65")


class Writer:
    """Writes one random program, mostly of right form; ``wild`` is how often it does something odd."""

    def __init__(self, draw: Random) -> None:
        self.draw, self.wild = draw, draw.choice((0.0, 0.02, 0.15))
        self.scope, self.calls = ["P", "M"], False
        self.place, self.chunks = draw.choice(_PLACES)
        self.left = draw.randint(5, 60)

    def one(self, *makers: Callable[[], str]) -> str:
        return self.draw.choice(makers)()

    def value(self, depth: int = 0) -> str:
        self.left -= 1
        if depth > 3 or self.left < 0 or self.draw.random() < 0.4:
            number = str(self.draw.choice((0, 1, 1, 2, 3, 4, 8, *((10**9, 2**31) if self.odd() else ()))))
            return number if self.draw.random() < 0.4 else self.name()
        return self.one(
            lambda: f"{self.value(depth + 1)} {self.draw.choice(('+', '-', '*', '//', '%'))} {self.value(depth + 1)}",
            lambda: f"({self.value(depth + 1)})",
            lambda: f"-{self.value(depth + 1)}",
            lambda: f"{self.draw.choice(('min', 'max'))}({self.value(depth + 1)}, {self.value(depth + 1)})",
            lambda: f"({self.value(depth + 1)} if {self.truth(depth + 1)} else {self.value(depth + 1)})",
            lambda: f"({self.truth(depth + 1)})",
            lambda: f"f({self.value(depth + 1)})" if self.calls else "1",
        )

    def truth(self, depth: int = 0) -> str:
        sides = self.value(depth + 1), self.value(depth + 1)
        plain = f"{sides[0]} {self.draw.choice(('==', '!=', '<', '<=', '>', '>='))} {sides[1]}"
        if self.draw.random() < 0.15:
            return f"{plain} {self.draw.choice(('and', 'or'))} not {self.truth(depth + 2)}" if depth < 3 else plain
        return plain

    def name(self) -> str:
        return self.draw.choice(_NAMES) if self.odd() else self.draw.choice(self.scope)

    def odd(self) -> bool:
        return self.draw.random() < self.wild

    def op(self) -> str:
        return self.of_kind(self.draw.choice("FFFBBBIW"))

    def of_kind(self, kind: str) -> str:
        chunk = "" if self.chunks == 1 else str(self.draw.randrange(self.chunks))
        if self.draw.random() < 0.1:
            chunk = self.draw.choice(("", "1", f"[{self.value(2)}]"))
        return kind + chunk + (f" @ {self.value(2)}" if self.draw.random() < 0.1 else "")

    def pair(self) -> str:
        first, second = ("F", self.draw.choice("BBI")) if not self.odd() else (self.draw.choice("FB"), "B")
        return f"{self.of_kind(first)} & {self.of_kind(second)}"

    def block(self, depth: int) -> str:
        known = list(self.scope)
        parts = [self.statement(depth) for _ in range(self.draw.randint(0 if self.odd() else 1, 3))]
        self.scope = known
        return "{ " + "  ".join(parts) + " }"

    def statement(self, depth: int) -> str:
        self.left -= 1
        makers: list[Callable[[], str]] = [self.op, self.op, self.pair]
        if depth < 4 and self.left > 0:
            makers += [self.let, lambda: self.loop(depth), lambda: f"if {self.truth()} {self.block(depth + 1)}"]
            makers += [lambda: f"phase a {self.block(depth + 1)}", lambda: f"phase b {self.loop(depth)}"]
            if self.draw.random() < 0.2:
                makers += [lambda: self.timed(depth), lambda: self.policy(depth)]
        return self.one(*makers)

    def let(self) -> str:
        name, value = self.draw.choice("abcdw"), self.value()
        self.scope.append(name)
        return f"let {name} = {value}"

    def loop(self, depth: int) -> str:
        if self.draw.random() < 0.6:
            return f"repeat {self.value(1)} {self.block(depth + 1)}"
        low, high = self.value(2), self.value(2)
        self.scope.append("i")
        text = f"for i in {low} ..< {high} {self.block(depth + 1)}"
        self.scope.remove("i")
        return text

    def timed(self, depth: int) -> str:
        fill = self.draw.choice(("", " pair")) + self.draw.choice(("", " fill W", f" fill W within {self.value(2)}"))
        slots = self.slots()
        return f"timed{fill} {{ {slots} }}" if depth else f"phase t timed{fill} {{ for i in 0 ..< M {{ {slots} }} }}"

    def slots(self) -> str:
        return " ".join(f"{self.op()} at {self.value(2)}" for _ in range(self.draw.randint(1, 3)))

    def policy(self, depth: int) -> str:
        prefer = self.draw.choice(("", " prefer B > F", " prefer F & B > B > F", " prefer F > F"))
        cap = self.draw.choice(("", f" cap F - B <= {self.value(2)}", f" cap F <= {self.value(2)}"))
        other = f" or {self.block(depth + 1)}" if self.draw.random() < 0.3 else ""
        aim = self.draw.choice(("", "", " by span", " by makespan", " by by"))
        if self.draw.random() < 0.3:
            kept = self.draw.choice(("", f" keep {self.value(2)} of 8", " keep 3 of 8", " keep 9 of 8"))
            every = "{ repeat M { F }  repeat M { I }  repeat M { W } }"
            block = self.draw.choice((every, every, self.block(depth + 1)))
            return f"policy{aim} search within {self.draw.choice(('P', self.value(2)))}{kept} {block}{other}"
        slots = f"{{ for i in 0 ..< M {{ {self.slots()} }} }}"
        block = slots if self.draw.random() < 0.3 else self.block(depth + 1)
        return f"policy{aim}{prefer}{cap} {block}{other}"

    def whole(self) -> str:
        """A rank's whole order in the usual three phases, so that some programs are legal."""
        w = self.draw.choice(("min(P-1-r, M)", "M", "0", "min(P-r, M)", self.value()))
        chunks = [""] if self.chunks == 1 else list(map(str, range(self.chunks)))
        turn = "F & B" if self.chunks == 1 and self.draw.random() < 0.2 else "F  B"
        split = self.draw.random() < 0.3
        again = self.draw.random() < 0.2
        backward = "R  B" if again else "B"

        def each(letters: str) -> str:
            letters = letters.replace("B", backward)
            ops = [kind + chunk for kind in letters.split() for chunk in (chunks if kind == "F" else chunks[::-1])]
            return " ".join(ops).replace("B", "I") + ("  W" if split and "B" in letters else "")

        steady = each(turn) if "&" not in turn else turn
        text = (
            f"phase warmup repeat w {{ {each('F')} }}\n phase steady repeat M - w {{ {steady} }}\n"
            f" phase cooldown repeat w {{ {each('B')} }}"
        )
        return f"let w = {w}\n " + (text if split else text.replace("I", "B"))

    def program(self) -> str:
        sizes = ["P: ranks = 4", "M: microbatches = 8"]
        if self.draw.random() < 0.3:
            sizes.append(self.draw.choice(_ODD_PARAMETERS if self.odd() else _PARAMETERS))
            self.scope.append(sizes[-1][0])
        items = []
        if self.draw.random() < 0.2:
            self.calls = True
            items.append(f"fn f(k) = {self.draw.choice(('k', 'k % P', 'k + 1', 'f(k)' if self.odd() else '2*k'))}")
        if self.draw.random() < 0.2:
            items.append(self.let())
        if self.draw.random() < 0.3:
            items.append(f"require {self.truth()}")
        items.append("place " + (self.draw.choice(_ODD_PLACES) if self.odd() else self.place))
        self.scope.append("r")
        body = self.whole() if self.draw.random() < 0.5 else self.block(0)[2:-2]
        items.append(f"rank r {{\n {body}\n}}")
        for _ in range(self.draw.randint(0, 2)):
            metric = self.draw.choice(("bubble", "makespan", "peak_activations[r]", "ops[r]", "span_bubble_ratio"))
            costs = self.draw.choice(("F", "(F+B)*(P-1)", "W", self.value()))
            items.append(
                f"expect {metric} {self.draw.choice(('==', '<='))} {costs}" + self.draw.choice(("", " when F == I"))
            )
        if self.odd():
            self.draw.shuffle(items)
        return f"sched 1\nschedule x({', '.join(sizes)}) {{\n" + "\n".join(items) + "\n}\n"
