"""Runs the language server over stdio: answers with diagnostics, hover texts and formatted texts (LSP 3.17)."""

from __future__ import annotations

from lsprotocol import types
from pygls.lsp.server import LanguageServer

from schedc import __version__
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.editor.findings import findings
from schedc.editor.hover import hover_code
from schedc.source import NOWHERE, Source, Span
from schedc.syntax.formatter import format_source


def serve() -> None:
    """Answer on stdin and stdout until the client exits."""
    server = LanguageServer("schedc", __version__, text_document_sync_kind=types.TextDocumentSyncKind.Full)
    server.feature(types.TEXT_DOCUMENT_DID_OPEN)(_opened)
    server.feature(types.TEXT_DOCUMENT_DID_CHANGE)(_changed)
    server.feature(types.TEXT_DOCUMENT_DID_CLOSE)(_closed)
    server.feature(types.TEXT_DOCUMENT_HOVER)(_hover)
    server.feature(types.TEXT_DOCUMENT_FORMATTING)(_format)
    server.start_io()


def _opened(server: LanguageServer, params: types.DidOpenTextDocumentParams) -> None:
    _publish(server, params.text_document.uri)


def _changed(server: LanguageServer, params: types.DidChangeTextDocumentParams) -> None:
    _publish(server, params.text_document.uri)


def _closed(server: LanguageServer, params: types.DidCloseTextDocumentParams) -> None:
    server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(params.text_document.uri, []))


def _hover(server: LanguageServer, params: types.HoverParams) -> types.Hover | None:
    source = _source(server, params.text_document.uri)
    line = params.position.line + 1
    explanation = hover_code(source, line, _column(source.line(line), params.position.character))
    if explanation is None:
        return None
    text, span = explanation
    return types.Hover(types.MarkupContent(types.MarkupKind.Markdown, text), _range(source, span))


def _format(server: LanguageServer, params: types.DocumentFormattingParams) -> list[types.TextEdit]:
    """One edit that replaces the whole text; none if nothing changes or the text does not parse."""
    source = _source(server, params.text_document.uri)
    try:
        text = format_source(source)
    except DiagnosticError:
        return []
    if text == source.text:
        return []
    whole = types.Range(types.Position(0, 0), types.Position(len(source.lines), 0))
    return [types.TextEdit(whole, text)]


def _publish(server: LanguageServer, uri: str) -> None:
    source = _source(server, uri)
    diagnostics = [_diagnostic(source, uri, finding) for finding in findings(source)]
    server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, diagnostics))


def _source(server: LanguageServer, uri: str) -> Source:
    document = server.workspace.get_text_document(uri)
    return Source(document.filename or uri, document.source)


def _diagnostic(source: Source, uri: str, finding: Diagnostic) -> types.Diagnostic:
    message = "\n".join(
        (
            finding.message,
            *(f"note: {note}" for note in finding.notes),
            *([f"help: {finding.help}"] * bool(finding.help)),
        )
    )
    related = [
        types.DiagnosticRelatedInformation(types.Location(uri, _range(source, label.span)), label.text)
        for label in finding.secondary
    ]
    return types.Diagnostic(
        range=_range(source, finding.primary.span),
        message=message,
        severity=types.DiagnosticSeverity.Error,
        code=finding.code,
        source="schedc",
        related_information=related or None,
    )


def _range(source: Source, span: Span) -> types.Range:
    """A span in the client's terms: lines and UTF-16 units from 0. `NOWHERE` becomes the start of the text."""
    if span == NOWHERE:
        return types.Range(types.Position(0, 0), types.Position(0, 0))
    ends = ((span.line, span.column), (span.end_line, span.end_column))
    return types.Range(*(types.Position(line - 1, _units(source.line(line)[: column - 1])) for line, column in ends))


def _units(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


def _column(line: str, character: int) -> int:
    """The column, from 1, of a character given in UTF-16 units from 0."""
    return len(line.encode("utf-16-le")[: 2 * character].decode("utf-16-le", errors="ignore")) + 1
