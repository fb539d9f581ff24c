"""Providers: who does a part of a step that can be done in several ways, by kind and name.

The project's own stand in a table per kind. Packages add more by entry points of the group `GROUP`, each named as the
provider that it loads:

    [project.entry-points."schedc_runtime.providers"]
    deepx = "deepx.schedc:PROVIDER"

An entry point is loaded when its provider is named or listed, and never by itself. A provider runs where a plan or
``Pipeline(providers={kind: name})`` names it; what is named and cannot serve is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar, get_args

from schedc_runtime.errors import RuntimeFault

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP = "schedc_runtime.providers"
"""The group of entry points."""

KINDS = {
    "products": "multiplies rows by the matrices of their experts",
    "exchange": "packs rows, and brings them to their experts and back",
    "loss": "computes the cross entropy of a chunk of logits, with its gradient",
    "norm": "computes RMSNorms, with their gradients",
}
"""What providers of each kind do."""

TORCH = "torch"
"""The name of torch's own way among exchanges, losses and norms: it runs where nobody names another."""

Bits = Literal["loop", "own"]
"""loop: results have the bits of the project's own way. own: sums in another order, so that results are compared by
tolerance."""


class AnyProvider(Protocol):
    """What all kinds of providers have. A kind says what else: `moe.products.Provider`, `transit.base.Exchanger`,
    `loss_providers.LossProvider`, `fusion.norms.NormProvider`.

    why_not: the reason why it cannot serve a case; empty where it can.
    """

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def bits(self) -> Bits: ...

    @property
    def why_not(self) -> Callable[[Any], str]: ...


T = TypeVar("T", bound=AnyProvider)


class ProviderFault(RuntimeFault):
    """A provider's package is at fault: it does not import, or gives what is no provider."""


def lacks_package(package: str, module: str, device: torch.device) -> str:
    """Why a package of kernels for GPUs cannot run on a device; empty where it can. module: what it installs."""
    if find_spec(module) is None:
        return f"the package `{package}` is not installed"
    return f"the kernels of `{package}` need a GPU" if device.type == "cpu" else ""


def check_result(provider: AnyProvider, what: str, result: Tensor, shape: Sequence[int], like: Tensor) -> None:
    """Raise `ProviderFault` unless a result has the ``shape``, and the dtype and device of ``like`` [...]."""
    form, wanted = (tuple(result.shape), result.dtype, result.device), (tuple(shape), like.dtype, like.device)
    if form != wanted:
        raise ProviderFault(
            f"{provider.kind} {provider.name} gives {what} as {_in_words(*form)}, expected {_in_words(*wanted)}",
            f"mend or drop `{provider.name}`",
        )


def _in_words(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


class ProviderTable(Mapping[str, T], Generic[T]):
    """The project's own providers of a kind by name, best first; `named` also finds those of packages."""

    def __init__(self, kind: str, own: Iterable[T]) -> None:
        self.kind, self._own = kind, {provider.name: provider for provider in own}

    def __getitem__(self, name: str) -> T:
        return self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def named(self, name: str, *others: str) -> T:
        """The provider of a name, here or in a package. others: names to tell besides, where there is none.

        Raises `RuntimeFault` for an unknown name, and `ProviderFault` for a package that is at fault.
        """
        points = _points().get(name, ())
        if name in self._own and not points:
            return self._own[name]
        if not points:
            possible = ", ".join((*others, *self._own, *sorted(self._offered())))
            raise RuntimeFault(f"{self.kind} `{name}`", f"possible: {possible}")
        provider: T = loaded(name, *(["this project"] if name in self._own else []))
        if provider.kind != self.kind:
            raise RuntimeFault(
                f"{self.kind} `{name}`: {_whose(points)} has a provider of this name, of kind `{provider.kind}`",
                f"name it as `{provider.kind}`",
            )
        return provider

    def _offered(self) -> set[str]:
        """Names of packages' providers of this kind, as far as they load."""
        return {row.name for row in offers() if row.kind == self.kind} - self._own.keys()


def loaded(name: str, *others: str) -> Any:
    """The provider of a package's entry point. others: who else has that name. Raises `ProviderFault`."""
    points = _points()[name]
    owners = [*others, *map(_package, points)]
    if len(owners) > 1:
        raise ProviderFault(
            f"provider `{name}` is offered by {' and by '.join(owners)}",
            "uninstall all but one of them, or let a package give its entry point another name",
        )
    (point,) = points
    try:
        provider = point.load()
    except Exception as error:
        raise ProviderFault(
            f"provider `{name}` of {owners[0]} does not load from `{point.value}`: {type(error).__name__}: {error}",
            f"install the modules that {owners[0]} imports, or uninstall {owners[0]}",
        ) from error
    if wrong := _wrong(name, provider):
        raise ProviderFault(f"provider `{name}` of {owners[0]} {wrong}", f"mend `{point.value}`, or uninstall it")
    return provider


def _wrong(name: str, provider: Any) -> str:
    """What keeps an object from being the provider of a name; empty where nothing does."""
    if lacking := [field for field in ("name", "kind", "bits", "why_not") if not hasattr(provider, field)]:
        return f"is {type(provider).__name__}, without `{lacking[0]}`"
    if provider.name != name:
        return f"calls itself `{provider.name}`"
    if provider.kind not in KINDS:
        return f"is of the unknown kind `{provider.kind}`; kinds are {', '.join(KINDS)}"
    if provider.bits not in get_args(Bits):
        return f"has bits `{provider.bits}`; possible are {', '.join(get_args(Bits))}"
    return ""


class Offer(NamedTuple):
    """A package's entry point. kind: empty where it does not load. fault: the error of its load, else empty."""

    name: str
    package: str
    kind: str
    fault: str


def offers() -> list[Offer]:
    """All entry points of packages, loaded as far as they load, by name."""
    rows = []
    for name, points in sorted(_points().items()):
        try:
            kind, fault = loaded(name).kind, ""
        except ProviderFault as error:
            kind, fault = "", error.message
        rows.append(Offer(name, _whose(points), kind, fault))
    return rows


@dataclass(frozen=True)
class NamedProviders:
    """The providers that the user names: ``Pipeline(providers={"exchange": "deepep"})``, by kind."""

    names: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, providers: Mapping[str, str] | None) -> NamedProviders:
        """Raises `RuntimeFault` for a kind that is none."""
        for kind in providers or ():
            if kind not in KINDS:
                raise RuntimeFault(f"providers= names the kind `{kind}`", f"possible: {', '.join(KINDS)}")
        return cls(tuple(sorted((providers or {}).items())))

    def __getitem__(self, kind: str) -> str:
        """The name of the kind's provider; empty where none is named."""
        return dict(self.names).get(kind, "")


NOBODY_NAMED = NamedProviders()
"""What stands where the user names no provider."""


@cache
def _points() -> dict[str, tuple[EntryPoint, ...]]:
    """Entry points by name."""
    points = entry_points(group=GROUP)
    return {name: tuple(point for point in points if point.name == name) for name in points.names}


def _package(point: EntryPoint) -> str:
    return f"package `{point.dist.name}`" if point.dist is not None else f"`{point.value}`"


def _whose(points: Iterable[EntryPoint]) -> str:
    return " and ".join(map(_package, points))
