"""Digests of what editors get: hover texts, formatted texts and highlighted words (see digests.py)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from digest_values import anonymous, sha


def editor_cases(files: list[str]) -> Iterator[tuple[str, str]]:
    """What the language server says of files: hover texts, of each word at its first place, and formatted texts."""
    texts = {name: Path(name).read_text(encoding="utf-8") for name in files}
    requests: list[tuple[str, dict[str, Any]]] = []
    for name, text in texts.items():
        document = {"uri": Path(name).resolve().as_uri()}
        places: dict[str, tuple[int, int]] = {}
        for number, line in enumerate(text.splitlines()):
            for word in re.finditer(r"[\w.]+|[^\w\s]", line):
                places.setdefault(word[0], (number, word.start()))
        options = {"tabSize": 2, "insertSpaces": True}
        requests.append((f"format {name}", {"method": "textDocument/formatting",
                                            "params": {"textDocument": document, "options": options}}))  # fmt: skip
        for line, column in places.values():
            position = {"line": line, "character": column}
            params = {"textDocument": document, "position": position}
            requests.append((f"hover {name}", {"method": "textDocument/hover", "params": params}))
    answers = served(texts, [request for _, request in requests])
    joined: dict[str, list[str]] = {}
    for number, (case, _) in enumerate(requests):
        joined.setdefault(case, []).append(anonymous(json.dumps(answers[number], sort_keys=True)))
    yield from ((case, sha(*parts)) for case, parts in joined.items())


def served(texts: dict[str, str], requests: list[dict[str, Any]]) -> dict[int, Any]:
    """The language server's answers to requests about these documents, by number of the request."""
    opened = [
        {"method": "textDocument/didOpen", "params": {"textDocument": {
            "uri": Path(name).resolve().as_uri(), "languageId": "sched", "version": 1, "text": text}}}
        for name, text in texts.items()
    ]  # fmt: skip
    messages: list[dict[str, Any]] = [
        {"id": 10**6, "method": "initialize", "params": {"processId": None, "rootUri": None, "capabilities": {}}},
        {"method": "initialized", "params": {}},
        *opened,
        *({"id": number, **request} for number, request in enumerate(requests)),
        {"id": 10**6 + 1, "method": "shutdown", "params": None},
        {"method": "exit", "params": None},
    ]
    bodies = [json.dumps({"jsonrpc": "2.0", **message}).encode() for message in messages]
    data = b"".join(b"Content-Length: %d\r\n\r\n%s" % (len(body), body) for body in bodies)
    ran = subprocess.run(
        [sys.executable, "-m", "schedc", "lsp"], input=data, capture_output=True, timeout=120, check=False
    )
    answers: dict[int, Any] = {}
    rest = ran.stdout
    while rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        length = int(re.search(rb"Content-Length: (\d+)", head)[1])  # type: ignore[index]
        message = json.loads(rest[:length])
        rest = rest[length:]
        if "id" in message and "method" not in message:
            answers[message["id"]] = message.get("result", message.get("error"))
    return answers


def highlighted(name: str) -> str:
    """The tokens that the highlighter sees in a file."""
    for module in ("schedc.editor.highlight", "schedc.highlight"):
        try:
            lexer = import_module(module).SchedLexer()
        except ImportError:
            continue
        return sha(json.dumps([(str(kind), text) for kind, text in lexer.get_tokens(Path(name).read_text("utf-8"))]))
    raise ImportError("SchedLexer")
