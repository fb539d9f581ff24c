"""The extension for VS Code and the configurations of other editors, as text; the server has tests of its own."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from schedc import __version__
from support.needs import needed
from support.paths import ROOT

FOLDER = ROOT / "editors" / "vscode"
PACKAGE = json.loads((FOLDER / "package.json").read_text(encoding="utf-8"))
CLIENT = (FOLDER / "src" / "extension.js").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "guide" / "editing.md").read_text(encoding="utf-8")


def block(language: str, mark: str) -> str:
    """The only block of the page in a language that has a text."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if mark in text]
    return str(found)


@pytest.mark.slow
def test_the_client_uses_what_its_package_declares() -> None:
    declared = {entry["command"] for entry in PACKAGE["contributes"]["commands"]}
    assert set(re.findall(r'registerCommand\("([\w.]+)"', CLIENT)) == declared
    settings = set(PACKAGE["contributes"]["configuration"]["properties"])
    assert {f"schedc.{name}" for name in re.findall(r'settings\.get\("(\w+)"\)', CLIENT)} == settings
    needed("pygls")
    from schedc.editor.server import _ANSWERS

    assert set(re.findall(r'sendRequest\("([\w/]+)"', CLIENT)) <= _ANSWERS.keys()
    assert {f"./{name}" for name in ("language-configuration.json", "syntaxes/sched.tmLanguage.json")} == {
        *(each["configuration"] for each in PACKAGE["contributes"]["languages"]),
        *(each["path"] for each in PACKAGE["contributes"]["grammars"]),
    }
    assert PACKAGE["version"] == __version__
    lock = json.loads((FOLDER / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert lock[""]["devDependencies"] == PACKAGE["devDependencies"]
    assert all(each["integrity"].startswith("sha512-") for name, each in lock.items() if name)
    assert len(CLIENT.splitlines()) < 120


def test_the_archive_has_what_an_editor_installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("pack", FOLDER / "pack.py")
    assert spec is not None
    assert spec.loader is not None
    pack: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    here = tmp_path / "editors" / "vscode"
    for name in pack.FILES:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes((FOLDER / name).read_bytes() if name != "dist/extension.js" else CLIENT.encode())
    (tmp_path / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    monkeypatch.setattr(pack, "HERE", here)
    archives = [tmp_path / name for name in ("one.vsix", "two.vsix")]
    for path in archives:
        pack.pack(path)
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with zipfile.ZipFile(archives[0]) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    manifest = ElementTree.fromstring(inside["extension.vsixmanifest"])
    space = {"v": "http://schemas.microsoft.com/developer/vsx-schema/2011"}
    identity = manifest.find("v:Metadata/v:Identity", space)
    assert identity is not None
    assert (identity.get("Id"), identity.get("Version")) == (PACKAGE["name"], __version__)
    assert all(asset.get("Path") in inside for asset in manifest.iterfind("v:Assets/v:Asset", space))
    kinds = {each.get("Extension") for each in ElementTree.fromstring(inside["[Content_Types].xml"])}
    assert {f".{name.rpartition('.')[2]}" for name in inside if name != "[Content_Types].xml"} <= kinds
    assert f"extension/{PACKAGE['main'].removeprefix('./')}" in inside


def test_configurations_of_other_editors_start_the_server() -> None:
    helix = tomllib.loads(block("toml", "language-server"))
    server = helix["language-server"]["schedc"]
    assert [server["command"], *server["args"]] == ["schedc", "lsp"]
    (language,) = helix["language"]
    assert language["language-servers"] == ["schedc"]
    assert language["file-types"] == ["sched"]
    zed = json.loads(block("json", "binary"))
    binary = zed["lsp"]["schedc"]["binary"]
    assert [binary["path"], *binary["arguments"]] == ["schedc", "lsp"]
    assert 'cmd = { "schedc", "lsp" }' in block("lua", "vim.lsp")
    action = needed("yaml").safe_load(block("yaml", "uses"))
    inputs = needed("yaml").safe_load((ROOT / ".github/actions/check/action.yml").read_text())["inputs"]
    assert set(action["steps"][1]["with"]) <= set(inputs)
