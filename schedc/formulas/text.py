"""Formulas as people read them: factored, as text that a claim could hold, and as LaTeX. The only user of sympy."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import sympy
from sympy.printing.str import StrPrinter

from schedc.formulas.counts import CountPiece
from schedc.formulas.fit import Atom, LinearForm, Monomial, Table

LATENCY = "p2p"
_LATEX_NAMES = {"p2p": "t_{p2p}", "FB": "F{\\&}B"}


class _Claim(StrPrinter):  # type: ignore[misc]
    """Text in the language of claims, which has no powers."""

    def _print_Pow(self, expr: Any, rational: bool = False) -> str:
        base, exponent = expr.as_base_exp()
        if exponent.is_Integer and exponent > 1:
            return "*".join([self.parenthesize(base, sympy.printing.precedence.PRECEDENCE["Mul"])] * int(exponent))
        return str(super()._print_Pow(expr, rational))


def _symbol(name: str) -> Any:
    return sympy.Symbol(name, real=True)


def _monomial(monomial: Monomial) -> Any:
    return sympy.Mul(*(_symbol(atom.text) for atom in monomial))


def coefficients_text(form: LinearForm, symbols: Iterable[str]) -> dict[str, Any]:
    """The quasi-polynomial of each symbol, as a sympy expression."""
    listed = list(symbols)
    totals = dict.fromkeys(listed, sympy.Integer(0))
    for monomial, factors in form.terms:
        for name, factor in zip(listed, factors, strict=True):
            totals[name] += sympy.Rational(factor.numerator, factor.denominator) * _monomial(monomial)
    return totals


def expression(form: LinearForm, symbols: Iterable[str]) -> Any:
    """The linear form in the costs, factored; what counts latencies stands apart."""
    parts = {name: value for name, value in coefficients_text(form, symbols).items() if value != 0}
    work = [(_symbol(name), value) for name, value in parts.items() if name != LATENCY]
    total = _shortest(sympy.Add(*(s * v for s, v in work)), tuple(s for s, _ in work))
    latency = parts.get(LATENCY, sympy.Integer(0))
    return total + _symbol(LATENCY) * _shortest(latency, ())


def count_expression(form: LinearForm) -> Any:
    return _shortest(coefficients_text(form, [""])[""], ())


@lru_cache(maxsize=4096)
def _shortest(expr: Any, costs: tuple[Any, ...]) -> Any:
    """The shortest of a few ways to write the same, one without a leading minus and with a product first."""
    sizes = sorted((s for s in expr.free_symbols - set(costs) if s.name.isidentifier()), key=str)
    factored = sympy.factor(expr)
    ways = [factored, sympy.expand(expr), sympy.collect(sympy.expand(expr), costs)]
    ways += [way for size in sizes for way in _about(expr, size)]
    if factored.is_Mul and factored.could_extract_minus_sign():
        ways[0] = sympy.Mul(*_turned(factored))
    lengths = {way: _length(way, text(way)) for way in ways}
    least = min(lengths.values())
    return min((way for way, length in lengths.items() if length == least), key=str)


def _length(way: Any, written: str) -> int:
    return len(written) - 4 * bool(way.is_Mul) + 6 * written.startswith("-")


def _turned(product: Any) -> list[Any]:
    """The factors of a product with a minus sign, which one of the sums takes in."""
    factors = list((-product).args) if (-product).is_Mul else [-product]
    sums = [i for i, factor in enumerate(factors) if factor.is_Add]
    if not sums:
        return [-1, *factors]
    return [-factor if i == sums[-1] else factor for i, factor in enumerate(factors)]


def _about(expr: Any, size: Any) -> list[Any]:
    """The expression as multiples of size - 1, size - 2 and size - 3 with what is left."""
    poly = sympy.Poly(expr, size)
    if poly.degree() != 1:
        return []
    slope, rest = poly.all_coeffs()
    return [sympy.factor(slope * (size - k)) + sympy.expand(rest + k * slope) for k in (1, 2, 3)]


def text(expr: Any) -> str:
    return str(_Claim().doprint(expr))


def latex(expr: Any, atoms: Iterable[Atom]) -> str:
    """LaTeX of an expression; ``atoms`` are those of its forms."""
    names = {_symbol(atom.text): atom.latex for atom in atoms}
    names |= {_symbol(name): written for name, written in _LATEX_NAMES.items()}
    return str(sympy.latex(expr, symbol_names=names))


def atoms_of(*forms: LinearForm) -> set[Atom]:
    return {atom for form in forms for monomial, _ in form.terms for atom in monomial}


def condition(form: LinearForm, symbols: Iterable[str], table: Table) -> tuple[Any, Any]:
    """The two sides of ``form >= 0``, smaller first: what counts negatively at the sizes of ``table`` goes there."""
    listed = list(symbols)
    values = form.at(table)
    sides: dict[bool, list[Any]] = {True: [], False: []}
    for index, (name, value) in enumerate(coefficients_text(form, listed).items()):
        if value != 0:
            less = bool((values[:, index] <= 0).all())
            sides[less].append(_symbol(name) * sympy.factor(-value if less else value))
    return sympy.Add(*sides[True]), sympy.Add(*sides[False])


def count_text(piece: CountPiece) -> str:
    parts = [text(count_expression(form)) for form in piece.forms]
    return f"{piece.combine}({', '.join(parts)})" if piece.combine else parts[0]


def count_latex(piece: CountPiece) -> str:
    atoms = atoms_of(*piece.forms)
    parts = [latex(count_expression(form), atoms) for form in piece.forms]
    return rf"\{piece.combine}\left({', '.join(parts)}\right)" if piece.combine else parts[0]
