"""Packs the bundled extension as a .vsix, an archive that VS Code and Open VSX install.

python editors/vscode/pack.py build/sched.vsix
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from xml.sax.saxutils import quoteattr

HERE = Path(__file__).resolve().parent
FILES = (
    "package.json",
    "README.md",
    "language-configuration.json",
    "syntaxes/sched.tmLanguage.json",
    "dist/extension.js",
)
TYPES = {"json": "application/json", "js": "application/javascript", "md": "text/markdown", "txt": "text/plain"}
DAWN = (1980, 1, 1, 0, 0, 0)
"""The time of all files inside, so that one tree gives one archive."""


def manifest(package: dict[str, str]) -> str:
    """The manifest of the archive, from package.json."""
    identity = {"Language": "en-US", "Id": package["name"], "Version": package["version"],
                "Publisher": package["publisher"]}  # fmt: skip
    written = " ".join(f"{name}={quoteattr(value)}" for name, value in identity.items())
    engine = quoteattr(json.loads((HERE / "package.json").read_text(encoding="utf-8"))["engines"]["vscode"])
    return f"""<?xml version="1.0" encoding="utf-8"?>
<PackageManifest Version="2.0.0" xmlns="http://schemas.microsoft.com/developer/vsx-schema/2011">
  <Metadata>
    <Identity {written}/>
    <DisplayName>{package["displayName"]}</DisplayName>
    <Description xml:space="preserve">{package["description"]}</Description>
    <Categories>{",".join(package["categories"])}</Categories>
    <License>extension/LICENSE.txt</License>
    <Properties><Property Id="Microsoft.VisualStudio.Code.Engine" Value={engine}/></Properties>
  </Metadata>
  <Installation><InstallationTarget Id="Microsoft.VisualStudio.Code"/></Installation>
  <Dependencies/>
  <Assets>
    <Asset Type="Microsoft.VisualStudio.Code.Manifest" Path="extension/package.json" Addressable="true"/>
    <Asset Type="Microsoft.VisualStudio.Services.Content.Details" Path="extension/README.md" Addressable="true"/>
    <Asset Type="Microsoft.VisualStudio.Services.Content.License" Path="extension/LICENSE.txt" Addressable="true"/>
  </Assets>
</PackageManifest>
"""


def content_types() -> str:
    """The media types of the files inside, by suffix."""
    rows = {**TYPES, "vsixmanifest": "text/xml"}
    each = "".join(f'<Default Extension=".{suffix}" ContentType="{kind}"/>' for suffix, kind in rows.items())
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">{each}</Types>\n'
    )


def pack(path: Path) -> None:
    """Write the archive."""
    package = json.loads((HERE / "package.json").read_text(encoding="utf-8"))
    inside = {"extension.vsixmanifest": manifest(package).encode(), "[Content_Types].xml": content_types().encode()}
    inside |= {f"extension/{name}": (HERE / name).read_bytes() for name in FILES}
    inside["extension/LICENSE.txt"] = (HERE.parents[1] / "LICENSE").read_bytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in inside.items():
            archive.writestr(zipfile.ZipInfo(name, DAWN), content, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
