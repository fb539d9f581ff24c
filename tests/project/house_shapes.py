"""Which public docstrings must say shapes or units, and which of them do not.

A public function, method or property must when an annotation of its arguments or result names an array: `Tensor`,
`ndarray`, `NDArray` or an alias of `schedc.ir.arrays`. It must, too, when a parameter or the function has a word of
time or size in its name and is a number: `time`, `seconds`, `duration`, `makespan`, `bytes`, ... A public class must
when one of its annotated fields does. Tensors in a mapping by name are those of a state dict and need no shape.

What counts is the docstring, that of the class, the strings below its fields, and the docstring of the method that is
overridden. It says a shape when it has one in brackets (``[ops]``, ``[P, M]``, ``[...]``) or the word shape or scalar.
It says a unit when it has a word for seconds or bytes, or says time units, units of, or chunks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from project.house_imports import PACKAGES, sources

ARRAYS = {"Tensor", "ndarray", "NDArray"}
ALIASES = {"Floats", "Bools", "Int8", "Int32", "Int64", "Integers"}
QUANTITIES = {
    "time", "times", "seconds", "duration", "durations", "latency", "latencies", "makespan", "makespans",
    "bytes", "milliseconds", "nanoseconds", "bubble", "bubbles", "delay", "delays", "timeout",
}  # fmt: skip
SAID = re.compile(
    r"\[[^\]\n]+\]|\bscalars?\b|\bshapes?\b|\b(?:milli|micro|nano)?seconds?\b|\bms\b|\bns\b|\bbytes?\b|\b[KMG]i?B\b"
    r"|\btime units?\b|\bunits? of\b|\bin chunks\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Required:
    """A public name that must say a shape or unit: line, reason, and the text that counts."""

    line: int
    name: str
    why: str
    text: str

    @property
    def silent(self) -> bool:
        return not SAID.search(self.text)


def required(path: Path) -> list[Required]:
    """The public names of a file that must say a shape or unit, by line."""
    return list(_required(_tree(path), "", ""))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _required(node: ast.AST, prefix: str, around: str) -> Iterator[Required]:
    """around: texts of the class around the definitions."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            text = _said(child)
            reasons = [_why(field.target.id, field.annotation) for field in _fields(child)]
            if why := next(filter(None, reasons), ""):
                yield Required(child.lineno, prefix + child.name, why, text)
            yield from _required(child, f"{prefix}{child.name}.", text + _inherited(child))
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_")
        if function and (why := _asked(child)):
            own = ast.get_docstring(child) or _overridden(node, child.name)
            yield Required(child.lineno, prefix + child.name, why, f"{around}\n{own}")


@cache
def _classes() -> dict[str, ast.ClassDef]:
    """The public classes of both packages, by name."""
    trees = [_tree(path) for package in PACKAGES for path in sources(package)]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def _bases(node: ast.AST) -> list[ast.ClassDef]:
    """The classes of these packages that a class extends, directly or not."""
    names = [ast.unparse(base).split("[")[0].split(".")[-1] for base in getattr(node, "bases", [])]
    direct = [_classes()[name] for name in names if name in _classes()]
    return [each for base in direct for each in (base, *_bases(base))]


def _inherited(node: ast.ClassDef) -> str:
    return "".join(f"\n{_said(base)}" for base in _bases(node))


def _overridden(node: ast.AST, name: str) -> str:
    """The docstring of the method of this name in a base class."""
    methods = [method for base in _bases(node) for method in base.body
               if isinstance(method, ast.FunctionDef) and method.name == name]  # fmt: skip
    return next((text for method in methods if (text := ast.get_docstring(method))), "")


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [x for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
            and not x.target.id.startswith("_")]  # fmt: skip


def _said(node: ast.ClassDef) -> str:
    """A class's docstring and the strings below its fields."""
    texts = [x.value.value for x in node.body if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
    return "\n".join(text for text in texts if isinstance(text, str))


def _asked(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The first array or quantity that a function takes or gives; "" if it has none."""
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    reasons = [_why(each.arg, each.annotation) for each in every if each is not None]
    returned = _why(node.name, node.returns) if node.returns is not None else ""
    return next(filter(None, [*reasons, returned]), "")


def _why(name: str, annotation: ast.expr | None) -> str:
    """What makes a name need a shape or unit: an array in its annotation, or a number with a word of quantity."""
    text = "" if annotation is None else re.sub(r"(?:Mapping|dict)\[str, Tensor\]", "", ast.unparse(annotation))
    names = set(re.findall(r"\w+", text))
    if arrays := names & (ARRAYS | ALIASES):
        return f"{name}: {min(arrays)}"
    if names & {"float", "int"} and set(name.split("_")) & QUANTITIES:
        return f"{name}: {text}"
    return ""
