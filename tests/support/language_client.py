"""A language client that talks to `schedc lsp` over its standard streams."""

from __future__ import annotations

import json
import subprocess
import sys
from threading import Timer
from typing import Any


class LanguageClient:
    """A language client: requests out, answers and notifications in."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "schedc", "lsp"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.number = 0

    def notify(self, method: str, **params: Any) -> None:
        self._send({"jsonrpc": "2.0", "method": method, "params": params})

    def request(self, method: str, **params: Any) -> Any:
        self.number += 1
        self._send({"jsonrpc": "2.0", "id": self.number, "method": method, "params": params})
        return self.receive(lambda message: message.get("id") == self.number)["result"]

    def diagnostics(self) -> Any:
        return self.receive(lambda message: message.get("method") == "textDocument/publishDiagnostics")["params"]

    def receive(self, wanted: Any) -> Any:
        """The next message that is wanted; earlier messages are dropped. A server that stays silent is ended."""
        patience = Timer(60, self.process.kill)
        patience.start()
        try:
            return self._receive(wanted)
        finally:
            patience.cancel()

    def _receive(self, wanted: Any) -> Any:
        while True:
            length = 0
            while (header := self.process.stdout.readline().strip()) or not length:  # type: ignore[union-attr]
                assert header, self.process.stderr.read().decode()  # type: ignore[union-attr]
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            message = json.loads(self.process.stdout.read(length))  # type: ignore[union-attr]
            if wanted(message):
                return message

    def open(self, uri: str, text: str) -> Any:
        """Open a text; return its diagnostics."""
        document = {"uri": uri, "languageId": "sched", "version": 1, "text": text}
        self.notify("textDocument/didOpen", textDocument=document)
        return self.diagnostics()["diagnostics"]

    def initialize(self) -> Any:
        """Begin a session; return what the server can do."""
        capabilities = self.request("initialize", processId=None, rootUri=None, capabilities={})["capabilities"]
        self.notify("initialized")
        return capabilities

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
