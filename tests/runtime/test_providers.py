"""Providers of packages: found by name, loaded when named or listed, and refused by name with what helps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from schedc.ir.plan import Products
from schedc_runtime.commands import providers as command
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.products import PROVIDERS, Case, Provider, RowGroups, passed_over, provider_for
from schedc_runtime.providers import KINDS, NamedProviders, ProviderFault, loaded, offers
from support.packages import installed

CASE = Case(torch.device("cpu"), torch.float64, (6, 10, 5), False)


def _multiply(left: Tensor, right: Tensor, groups: RowGroups, weight: Tensor) -> Tensor:
    return PROVIDERS["loop"].multiply(left, right, groups, weight)


SLOW = Provider("slow", lambda case: "", _multiply, "own")
PICKY = Provider("picky", lambda case: "it takes float8", _multiply)
GROUPED = Provider("grouped", lambda case: "", _multiply)
OTHER_KIND = Provider("other", lambda case: "", _multiply, kind="telepathy")
OTHER_NAME = Provider("someone", lambda case: "", _multiply)
OTHER_BITS = Provider("bits", lambda case: "", _multiply, "few")  # type: ignore[arg-type]
FAILS = Provider("fails", lambda case: str(1 / 0), _multiply)
EXCHANGE = Provider("mover", lambda case: "", _multiply, kind="exchange")
NOTHING = 3

HERE = f"{__name__}:"
PACKAGES = {
    "multipliers": {"slow": "SLOW", "picky": "PICKY", "mover": "EXCHANGE", "fails": "FAILS", "twice": "SLOW"},
    "second": {"twice": "SLOW", "grouped": "GROUPED"},
    "broken": {
        "absent": "ABSENT", "other": "OTHER_KIND", "renamed": "OTHER_NAME", "bits": "OTHER_BITS", "three": "NOTHING",
    },
}  # fmt: skip
"""By package: names and objects of its entry points."""


@pytest.fixture(autouse=True)
def _packages(tmp_path: Path) -> Iterator[None]:
    here = {package: {name: HERE + value for name, value in points.items()} for package, points in PACKAGES.items()}
    here["broken"]["unfound"] = "no_such_package:PROVIDER"
    with installed(tmp_path, here):
        yield


def test_a_package_is_taken_where_it_is_named_and_can_serve() -> None:
    assert provider_for(Products("slow"), CASE) is SLOW
    assert provider_for(Products(), CASE).name == "loop"
    with pytest.raises(RuntimeFault, match="products picky: it takes float8"):
        provider_for(Products("picky"), CASE)
    assert provider_for(Products("picky", or_fallback=True), CASE).name == "loop"
    assert passed_over(Products("picky", or_fallback=True), CASE)["picky"] == "it takes float8"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unfound", "provider `unfound` of package `broken` does not load from `no_such_package:PROVIDER`: ModuleNot"),
        ("absent", "does not load from .*ABSENT.*: AttributeError"),
        ("other", "is of the unknown kind `telepathy`; kinds are products, exchange, loss"),
        ("renamed", "calls itself `someone`"),
        ("bits", "has bits `few`"),
        ("three", "is int, without `name`"),
        ("twice", "is offered by package `multipliers` and by package `second`"),
    ],
)
def test_a_package_at_fault_is_named_with_what_helps(name: str, message: str) -> None:
    with pytest.raises(ProviderFault, match=message) as refused:
        loaded(name)
    assert "install" in refused.value.help
    assert any(row.name == name and row.fault for row in offers())


def test_names_of_the_project_are_taken_and_unknown_ones_are_listed() -> None:
    with pytest.raises(ProviderFault, match="`grouped` is offered by this project and by package `second`"):
        PROVIDERS.named("grouped")
    with pytest.raises(RuntimeFault, match=r"`mover`: package `multipliers` has a provider .* of kind `exchange`"):
        PROVIDERS.named("mover")
    with pytest.raises(RuntimeFault, match="products `cutlass`") as refused:
        PROVIDERS.named("cutlass", "auto")
    own = "bmm, grouped, loop, padded, tiles, triton, scaled_grouped, quantized"
    assert refused.value.help == f"possible: auto, {own}, fails, picky, slow"
    with pytest.raises(RuntimeFault, match="providers= names the kind `losses`"):
        NamedProviders.of({"losses": "liger"})


def test_the_list_has_all_providers_with_packages_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--dtype", "float64", "--width", "24"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("layers of width 24 in float64 on ")
    rows = {tuple(line.split()[:2]): line for line in lines}
    assert rows["products", "loop"].split() == ["products", "loop", "schedc", "serves"]
    assert rows["products", "slow"].split() == ["products", "slow", *["package", "`multipliers`", "serves"]]
    assert rows["products", "picky"].endswith("refused: it takes float8")
    assert rows["products", "fails"].endswith("refused: `why_not` fails: ZeroDivisionError: division by zero")
    assert rows["products", "grouped"].split("refused: ")[1].startswith("provider `grouped` is offered by this project")
    assert rows["exchange", "mover"].endswith("serves")
    assert rows["exchange", "torch"].endswith("serves")
    assert "no adapter yet" in rows["exchange", "nccl_ep"]
    assert "refused: " in rows["loss", "liger"]
    for name in ("absent", "other", "renamed", "bits", "three", "unfound", "twice"):
        assert any(f"refused: provider `{name}` " in line for line in lines)
    assert set(command.TABLES) == set(KINDS)
