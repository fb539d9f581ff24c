"""`check` checks the names and shapes of a schedule before any size is known, and reports all faults at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.elaborate.computed_orders import check_computed_orders
from schedc.elaborate.walk import bound_in, in_order, indexes, is_statement, parts
from schedc.ir.ops import PAIR_NAMES
from schedc.source import Source, Span
from schedc.step.costs.keys import COST_SYMBOLS
from schedc.syntax import tree as t
from schedc.syntax.words import BUILTINS, METRICS, OP_LETTERS, PLACEMENTS, ROLES


@dataclass(frozen=True)
class Meaning:
    """The meaning of a name. span: where the name is defined. arity: number of parameters of a function."""

    kind: str
    span: Span
    arity: int = 0


class NameUse(NamedTuple):
    """A name where it is defined, or used. span: of the definition, or of the expression that begins with the name."""

    name: str
    span: Span
    meaning: Meaning


_Names = dict[str, Meaning]

_PAIRS = f"pairs are {', '.join(map(' & '.join, PAIR_NAMES))}"


def check(tree: t.ScheduleTree) -> list[Diagnostic]:
    """All findings about ``tree`` that no size can change (codes S101 to S110), by place."""
    checker = _Checker(tree.source)
    checker.schedule(tree)
    return sorted(checker.findings, key=lambda finding: finding.primary.span)


def name_uses(tree: t.ScheduleTree) -> list[NameUse]:
    """Each definition and each use of a name of the schedule, by place. Unknown names have none."""
    checker = _Checker(tree.source)
    checker.schedule(tree)
    return sorted(checker.uses, key=lambda use: use.span)


def checked(tree: t.ScheduleTree) -> t.ScheduleTree:
    """The tree, marked as free of such findings. Raises `DiagnosticError` with all of them. A marked tree is kept."""
    if tree.checked:
        return tree
    if findings := check(tree):
        raise DiagnosticError(findings)
    return replace(tree, checked=True)


class _Checker:
    """Walks a schedule. Every method adds to ``findings`` and ``uses``, and goes on.

    later: by name, the place of each function of the file; tells a call that comes too early from an unknown function.
    single_chunk: whether the placement gives each rank one chunk, so ops name no chunk.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.findings: list[Diagnostic] = []
        self.uses: list[NameUse] = []
        self.later: dict[str, Span] = {}
        self.single_chunk = False

    def add(self, code: str, message: str, span: Span, label: str = "", *others: Label, help: str = "") -> None:
        self.findings.append(Diagnostic(code, message, Label(span, label), others, help=help, source=self.source))

    # ---- the schedule

    def schedule(self, tree: t.ScheduleTree) -> None:
        names: _Names = {}
        self.parameters(tree, names)
        self.later = {function.name: function.span for function in tree.functions}
        items: list[t.Require | t.Let | t.Function] = [*tree.requires, *tree.lets, *tree.functions]
        for item in sorted(items, key=lambda item: item.span):
            match item:
                case t.Require(condition=condition):
                    self.expr(condition, names)
                case t.Let(name=name, value=value, span=span):
                    self.expr(value, names)
                    self.define(name, "let", span, names, reserved=True)
                case t.Function():
                    self.function(item, names)
        self.places(tree, names)
        if len(tree.orders) > 1:
            self.one_of("S105", "`order for` line", [order.span for order in tree.orders], tree.span)
        for order in tree.orders:
            self.expr(order.microbatches, names)
        if len(tree.ranks) != 1:
            self.one_of("S105", "`rank r { ... }` block", [block.span for block in tree.ranks], tree.span)
        for block in tree.ranks:
            inner = dict(names)
            self.define(block.variable, "rank", block.span, inner)
            self.body(block.body, inner)
            self.findings += check_computed_orders(block, self.source)
        for claim in tree.claims:
            self.claim(claim, names, bound_in(tree.ranks))

    def one_of(self, code: str, what: str, spans: Sequence[Span], whole: Span) -> None:
        """Report that the schedule has none or several of a thing, of which it needs exactly one."""
        if not spans:
            self.add(code, f"the schedule has no {what}", whole, "this schedule")
        else:
            others = (Label(spans[0], "the first is here"),)
            self.add(code, f"a schedule has exactly one {what}", spans[1], "another one", *others)

    def parameters(self, tree: t.ScheduleTree, names: _Names) -> None:
        hints = ""
        for parameter in tree.parameters:
            if parameter.role not in ROLES:
                help = did_you_mean(parameter.role, ROLES)
                hints += help
                self.add("S103", f"`{parameter.role}` is not a role of a size", parameter.span, help=help)
            self.define(parameter.name, "size", parameter.span, names, reserved=True)
        for role in ("ranks", "microbatches"):
            spans = [parameter.span for parameter in tree.parameters if parameter.role == role]
            if len(spans) != 1 and f"did you mean `{role}`" not in hints:
                self.one_of("S103", f"size with the role `{role}`", spans, tree.span)
        if len(spans := [parameter.span for parameter in tree.parameters if parameter.role == "segments"]) > 1:
            self.one_of("S103", "size with the role `segments`", spans, tree.span)

    def define(self, name: str, kind: str, span: Span, names: _Names, arity: int = 0, reserved: bool = False) -> None:
        """Give ``name`` a meaning. Report (S102) a name that already has a meaning.

        reserved: whether cost symbols and metrics are refused, too.
        """
        taken = name in BUILTINS or (reserved and name in (*COST_SYMBOLS, *METRICS))
        if taken:
            what = "a function of the language" if name in BUILTINS else "a word of claims"
            self.add("S102", f"`{name}` is {what}", span, help="choose another name")
        elif name in names:
            before = (Label(names[name].span, f"it is a {names[name].kind} here"),)
            self.add("S102", f"`{name}` already has a meaning", span, "and another one here", *before,
                     help="choose another name")  # fmt: skip
        else:
            names[name] = Meaning(kind, span, arity)
            self.uses.append(NameUse(name, span, names[name]))

    def function(self, function: t.Function, names: _Names) -> None:
        inner = dict(names)
        for parameter in function.parameters:
            self.define(parameter, "parameter", function.span, inner)
        self.expr(function.body, inner)
        self.define(function.name, "function", function.span, names, len(function.parameters), reserved=True)

    # ---- placement

    def places(self, tree: t.ScheduleTree, names: _Names) -> None:
        if len(tree.places) != 1:
            self.one_of("S104", "`place` line", [place.span for place in tree.places], tree.span)
        for place in tree.places:
            self.place(place, names)
        self.single_chunk = bool(tree.places) and tree.places[0].form == "linear"

    def place(self, place: t.Place, names: _Names) -> None:
        if place.form not in PLACEMENTS:
            help = did_you_mean(place.form, PLACEMENTS)
            self.add("S104", f"`{place.form}` is not a placement", place.span, help=help)
            return
        least, most = PLACEMENTS[place.form]
        if not least <= len(place.arguments) <= most:
            wanted = str(least) if least == most else f"{least} or {most}"
            message = f"`place {place.form}` takes {wanted} arguments, not {len(place.arguments)}"
            self.add("S104", message, place.span)
        for argument in place.arguments:
            self.expr(argument, names)
        self.routes(place, names)

    def routes(self, place: t.Place, names: _Names) -> None:
        named = [route for route in place.pipes if route.microbatches is not None]
        shape = (len(named), len(place.pipes) - len(named))
        if shape != {"map": (0, 1), "pipes": (2, 0)}.get(place.form, (0, 0)):
            wanted = {
                "map": "one route, `{ stage s on rank ... }`",
                "pipes": "two pipes, `{ down(M/2): stage s on rank s  up(M/2): stage s on rank P-1-s }`",
            }.get(place.form, "no routes")
            self.add("S104", f"`place {place.form}` has {wanted}", place.span)
        pipes: _Names = {}
        for route in place.pipes:
            if route.name:
                self.define(route.name, "pipe", route.span, pipes)
            if route.microbatches is not None:
                self.expr(route.microbatches, names)
            inner = dict(names)
            self.define(route.variable, "stage", route.span, inner)
            self.expr(route.rank, inner)

    # ---- statements

    def body(self, statements: Iterable[t.Statement], names: _Names) -> None:
        """Check a block. Names of the block end with it."""
        names = dict(names)
        for statement in statements:
            match statement:
                case t.Let(name=name, value=value, span=span):
                    self.expr(value, names)
                    self.define(name, "let", span, names)
                case t.OpItem():
                    self.op(statement, names)
                case t.SlotItem(op=op, slot=slot):
                    self.op(op, names)
                    self.expr(slot, names)
                case t.Timed(fill=fill, body=body):
                    if fill is not None and fill.within is not None:
                        self.expr(fill.within, names)
                    self.body(body, names)
                case t.Policy(choices=choices):
                    for choice in choices:
                        self.choice(choice, names)
                case t.PairItem():
                    self.pair(statement, names)
                case t.Phase(body=body):
                    self.body(body, names)
                case t.Repeat(count=count, body=body):
                    self.expr(count, names)
                    self.body(body, names)
                case t.For(name=name, start=start, stop=stop, body=body, span=span):
                    self.expr(start, names)
                    self.expr(stop, names)
                    inner = dict(names)
                    self.define(name, "loop variable", span, inner)
                    self.body(body, inner)
                case t.If(condition=condition, then=then, otherwise=otherwise):
                    self.expr(condition, names)
                    self.body(then, names)
                    self.body(otherwise, names)

    def op(self, op: t.OpItem, names: _Names) -> None:
        if op.chunk is not None and self.single_chunk:
            help = f"write `{op.kind}`; a microbatch is named as `{op.kind} @ 1`"
            self.add("S110", "`place linear` gives each rank one chunk, which is not written", op.chunk.span, help=help)
        for expr in (op.chunk, op.microbatch):
            if expr is not None:
                self.expr(expr, names)

    def choice(self, choice: t.Choice, names: _Names) -> None:
        if choice.search is not None:
            for part in (choice.search.within, choice.search.kept, choice.search.whole):
                if part is not None:
                    self.expr(part, names)
        for item in choice.prefer:
            self.pair(item, names) if isinstance(item, t.PairItem) else self.op(item, names)
        for cap in choice.caps:
            for op in (cap.counted, cap.freed):
                if op is not None:
                    self.op(op, names)
            self.expr(cap.most, names)
        self.body(choice.body, names)

    def pair(self, pair: t.PairItem, names: _Names) -> None:
        first, second = (op.kind for op in in_order(pair))
        if f"{first}{second}" not in PAIR_NAMES:
            message = f"`{pair.first.kind} & {pair.second.kind}` is not a pair"
            self.add("S108", message, pair.span, help=_PAIRS + "; R is written alone" * ("R" in (first, second)))
        self.op(pair.first, names)
        self.op(pair.second, names)

    # ---- values

    def expr(self, expr: t.Expr, names: Mapping[str, Meaning]) -> None:
        """Check an expression outside of claims, whose value is an integer."""
        match expr:
            case t.Int(value=float()):
                self.add(
                    "S107", "a decimal number outside of a claim", expr.span, help="sizes are integers; // divides"
                )
            case t.Index(name=name):
                self.add(
                    "S107",
                    f"`{name}[...]` outside of a claim",
                    expr.span,
                    help=f"there are no arrays: write a function, as `fn {name}(k) = ...`, and call it: `{name}(...)`",
                )
            case t.Name():
                self.name(expr, names)
            case t.Call():
                self.call(expr, names)
        for part in parts(expr):
            self.expr(part, names)

    def name(self, name: t.Name, names: Mapping[str, Meaning]) -> None:
        if name.id in names:
            self.uses.append(NameUse(name.id, name.span, names[name.id]))
            if names[name.id].kind == "function":
                self.add("S107", f"`{name.id}` is a function", name.span, help=f"call it: {name.id}(...)")
        elif name.id[0] in OP_LETTERS and (name.id[1:].isdigit() or len(name.id) == 1):
            self.add("S107", f"`{name.id}` is an op, not a value", name.span, help="costs have values only in claims")
        elif name.id in METRICS:
            self.add("S107", f"`{name.id}` is a metric, known only in claims", name.span)
        else:
            values = [value for value, meaning in names.items() if meaning.kind != "function"]
            self.add("S101", f"`{name.id}` is not known here", name.span, help=did_you_mean(name.id, values))

    def call(self, call: t.Call, names: Mapping[str, Meaning]) -> None:
        meaning = names.get(call.function)
        if meaning is not None:
            self.uses.append(NameUse(call.function, call.span, meaning))
        if meaning is not None and meaning.kind != "function":
            definition = Label(meaning.span, "given here")
            self.add("S106", f"`{call.function}` is a {meaning.kind}, not a function", call.span, "", definition)
            return
        if meaning is None and call.function not in BUILTINS:
            self.unknown_function(call, names)
            return
        least, most = (meaning.arity, meaning.arity) if meaning else BUILTINS[call.function]
        if not least <= len(call.arguments) <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            message = f"`{call.function}` takes {wanted} arguments, not {len(call.arguments)}"
            self.add("S106", message, call.span)

    def unknown_function(self, call: t.Call, names: Mapping[str, Meaning]) -> None:
        if call.function in self.later:
            definition = Label(self.later[call.function], "it is defined here")
            help = "a function may call only functions above it, so there is no recursion"
            self.add("S106", f"`{call.function}` is not defined yet", call.span, "called here", definition, help=help)
            return
        functions = [*BUILTINS, *(name for name, meaning in names.items() if meaning.kind == "function")]
        help = did_you_mean(call.function, functions)
        self.add("S101", f"`{call.function}` is not a function", call.span, help=help)

    # ---- claims

    def claim(self, claim: t.Claim, names: Mapping[str, Meaning], rank_only: set[str]) -> None:
        """Check a claim: it compares metrics with sizes and costs, and names a single rank only in ``[r]``.

        rank_only: names that the rank block defines, which claims cannot use.
        """
        ranks = {i.index.id for i in indexes(claim.claim) if isinstance(i.index, t.Name)}
        legal = {name for name, meaning in names.items() if meaning.kind == "size"} | {*COST_SYMBOLS, *METRICS}
        if not is_statement(claim.claim):
            help = "write for example `expect bubble == (P-1)*(F+B)`"
            self.add("S109", "a claim compares a metric with a value", claim.claim.span, help=help)
        self.claim_part(claim.claim, names, legal | ranks, rank_only)
        if claim.condition is not None:
            self.claim_part(claim.condition, names, legal, rank_only)

    def claim_part(self, expr: t.Expr, names: Mapping[str, Meaning], legal: set[str], rank_only: set[str]) -> None:
        """Check a part of a claim. legal: names that it may use."""
        match expr:
            case t.Index(name=name, index=index):
                if name not in METRICS:
                    self.add("S101", f"`{name}` is not a metric", expr.span, help=did_you_mean(name, METRICS))
                if not isinstance(index, t.Name) or index.id in names or index.id in (*COST_SYMBOLS, *METRICS):
                    help = f"write `{name}[r]`: the claim then speaks of every rank r"
                    self.add("S109", "the index of a metric is a name for any rank", index.span, help=help)
                return
            case t.Name(id=name) if name not in legal:
                self.unknown_in_claim(expr, names, legal, rank_only)
            case t.Name(id=name) if name in names:
                self.uses.append(NameUse(name, expr.span, names[name]))
            case t.Call(function=function):
                if function not in BUILTINS and function in names:
                    self.add("S109", "claims call only the functions of the language", expr.span,
                             help=f"known are {', '.join(BUILTINS)}")  # fmt: skip
                else:
                    self.call(expr, {})
        for part in parts(expr):
            self.claim_part(part, names, legal, rank_only)

    def unknown_in_claim(
        self, name: t.Name, names: Mapping[str, Meaning], legal: set[str], rank_only: set[str]
    ) -> None:
        """Report a name that is not legal in a claim: unknown (S101), or known only elsewhere (S109)."""
        if name.id in names or name.id in rank_only:
            help = "write its value; `metric[r]` speaks of every rank r" if name.id in rank_only else "write its value"
            place = "the rank block" if name.id in rank_only else "the order, not in claims"
            self.add("S109", f"`{name.id}` is known only in {place}", name.span, help=help)
        else:
            self.add("S101", f"`{name.id}` is not known here", name.span, help=did_you_mean(name.id, legal))
