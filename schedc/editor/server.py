"""Runs the language server over stdio: what `schedc.editor` knows of a text, in the terms of LSP 3.17."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from lsprotocol import types
from pygls.exceptions import JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer

from schedc import __version__
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.editor.complete import completions
from schedc.editor.findings import findings
from schedc.editor.hints import hints
from schedc.editor.hover import WORDS, hover_code, word_at
from schedc.editor.names import occurrence_at, references, rename
from schedc.editor.outline import OutlineSymbol, blocks, symbols
from schedc.editor.preview import preview
from schedc.editor.semantic import TOKEN_TYPES, semantic_tokens
from schedc.editor.sizes import editor_sizes
from schedc.fixes import finding_words, fix_of
from schedc.load.library import load, names, open_schedule
from schedc.source import NOWHERE, Source, Span
from schedc.syntax.formatter import format_source
from schedc.syntax.plan_words import FORMS

_AtPlace: TypeAlias = (
    types.HoverParams | types.CompletionParams | types.DefinitionParams | types.ReferenceParams | types.RenameParams
    | types.SignatureHelpParams
)  # fmt: skip
_PAUSE = 0.02
"""Seconds without a change after which findings are looked for."""
_APPLIED = re.compile(r"\bplan\s+\w+\s*=\s*$")
_COMPLETED = {
    "keyword": types.CompletionItemKind.Keyword,
    "name": types.CompletionItemKind.Variable,
    "op": types.CompletionItemKind.EnumMember,
    "line": types.CompletionItemKind.Snippet,
    "schedule": types.CompletionItemKind.Module,
}
_SYMBOLS = {
    "schedule": types.SymbolKind.Class,
    "plan": types.SymbolKind.Object,
    "size": types.SymbolKind.TypeParameter,
    "let": types.SymbolKind.Constant,
    "function": types.SymbolKind.Function,
    "phase": types.SymbolKind.Namespace,
    "claim": types.SymbolKind.Property,
    "line": types.SymbolKind.Field,
}


def serve() -> None:
    """Answer on stdin and stdout until the client exits."""
    server = LanguageServer("schedc", __version__, text_document_sync_kind=types.TextDocumentSyncKind.Full)
    for feature, answer in _ANSWERS.items():
        server.feature(feature, *_OPTIONS.get(feature, ()))(answer)
    server.start_io()


def _opened(server: LanguageServer, params: types.DidOpenTextDocumentParams) -> None:
    _publish(server, params.text_document.uri)


async def _changed(server: LanguageServer, params: types.DidChangeTextDocumentParams) -> None:
    """Publish after a pause, unless the text has changed again in it."""
    uri, version = params.text_document.uri, params.text_document.version
    await asyncio.sleep(_PAUSE)
    if server.workspace.get_text_document(uri).version == version:
        _publish(server, uri)


def _closed(server: LanguageServer, params: types.DidCloseTextDocumentParams) -> None:
    server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(params.text_document.uri, []))


def _hover(server: LanguageServer, params: types.HoverParams) -> types.Hover | None:
    source, line, column = _place(server, params)
    explanation = hover_code(source, line, column)
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


def _complete(server: LanguageServer, params: types.CompletionParams) -> list[types.CompletionItem]:
    source, line, column = _place(server, params)
    return [
        types.CompletionItem(each.word, kind=_COMPLETED[each.kind], detail=each.detail or None)
        for each in completions(source, line, column)
    ]


def _define(server: LanguageServer, params: types.DefinitionParams) -> types.Location | None:
    """The definition of a name; of the schedule of a plan also the file of the library."""
    source, line, column = _place(server, params)
    if (one := occurrence_at(source, line, column)) is not None:
        return types.Location(params.text_document.uri, _range(source, one.defined))
    return _shipped(source, line, column)


def _shipped(source: Source, line: int, column: int) -> types.Location | None:
    """The place of a schedule of the library that a plan applies."""
    word = word_at(source, line, column)
    if word is None or word[0] not in names() or not _APPLIED.search(source.line(line)[: word[1].column - 1]):
        return None
    shipped = load(word[0])
    tree = open_schedule(word[0])
    return types.Location(Path(shipped.place).absolute().as_uri(), _range(shipped, tree.span))


def _refer(server: LanguageServer, params: types.ReferenceParams) -> list[types.Location]:
    source, line, column = _place(server, params)
    return [types.Location(params.text_document.uri, _range(source, span)) for span in references(source, line, column)]


def _rename(server: LanguageServer, params: types.RenameParams) -> types.WorkspaceEdit:
    """The edits of a new name. Raises an error of the protocol that says why a name cannot be."""
    source, line, column = _place(server, params)
    places = rename(source, line, column, params.new_name)
    if isinstance(places, str):
        raise JsonRpcInvalidParams(places)
    edits = [types.TextEdit(_range(source, span), params.new_name) for span in places]
    return types.WorkspaceEdit(changes={params.text_document.uri: edits})


def _outline(server: LanguageServer, params: types.DocumentSymbolParams) -> list[types.DocumentSymbol]:
    source = _source(server, params.text_document.uri)
    return [_symbol(source, each) for each in symbols(source)]


def _symbol(source: Source, symbol: OutlineSymbol) -> types.DocumentSymbol:
    inner = [_symbol(source, each) for each in symbol.inner]
    whole, place = _range(source, symbol.whole), _range(source, symbol.place)
    return types.DocumentSymbol(symbol.name, _SYMBOLS[symbol.kind], whole, place, children=inner or None)


def _fold(server: LanguageServer, params: types.FoldingRangeParams) -> list[types.FoldingRange]:
    source = _source(server, params.text_document.uri)
    return [types.FoldingRange(begin - 1, end - 2) for begin, end in blocks(source) if end - 2 > begin - 1]


def _colour(server: LanguageServer, params: types.SemanticTokensParams) -> types.SemanticTokens:
    """Five numbers for each word: lines and units from the word before it, its length, its type, no modifiers."""
    source, data = _source(server, params.text_document.uri), list[int]()
    line = start = 0
    for each in semantic_tokens(source):
        place = _range(source, each.span)
        begin = place.start.character - (start if place.start.line == line else 0)
        length = place.end.character - place.start.character
        data += [place.start.line - line, begin, length, TOKEN_TYPES.index(each.type), 0]
        line, start = place.start.line, place.start.character
    return types.SemanticTokens(data)


def _hint(server: LanguageServer, params: types.InlayHintParams) -> list[types.InlayHint]:
    source, wanted = _source(server, params.text_document.uri), params.range
    found = []
    for each in hints(source):
        place = _range(source, Span(each.line, each.column, each.line, each.column)).start
        if wanted.start.line <= place.line <= wanted.end.line:
            found.append(types.InlayHint(place, each.text, padding_left=True))
    return found


def _act(server: LanguageServer, params: types.CodeActionParams) -> list[types.CodeAction]:
    """The edits that mend findings in a range. Safe ones are preferred."""
    uri = params.text_document.uri
    source, found = _source(server, uri), []
    for finding in findings(source, editor_sizes):
        fix, place = fix_of(finding), _diagnostic(source, uri, finding)
        if fix is None or not _meet(place.range, params.range):
            continue
        edit = types.WorkspaceEdit(changes={uri: [types.TextEdit(_range(source, fix.span), fix.text)]})
        kind = types.CodeActionKind.QuickFix
        found.append(types.CodeAction(fix.title, kind, [place], is_preferred=fix.safe, edit=edit))
    return found


def _meet(one: types.Range, other: types.Range) -> bool:
    def order(place: types.Position) -> tuple[int, int]:
        return place.line, place.character

    return order(one.start) <= order(other.end) and order(other.start) <= order(one.end)


def _sign(server: LanguageServer, params: types.SignatureHelpParams) -> types.SignatureHelp | None:
    """The form of the line of a plan at a place, and its meaning."""
    source, line, _ = _place(server, params)
    word = next(iter(source.line(line).split()), "")
    if word not in FORMS:
        return None
    return types.SignatureHelp([types.SignatureInformation(FORMS[word], documentation=WORDS[word])])


def _lens(server: LanguageServer, params: types.CodeLensParams) -> list[types.CodeLens]:
    """Above each schedule and plan, the command `schedc.preview` of the editor."""
    source = _source(server, params.text_document.uri)
    command = types.Command("draw", "schedc.preview")
    return [types.CodeLens(_range(source, symbol.place), command) for symbol in symbols(source)]


def _draw(server: LanguageServer, params: Any) -> dict[str, str | None]:
    """A page that draws the text of ``uri``; null while the text has findings."""
    return {"html": preview(_source(server, params.uri))}


def _place(server: LanguageServer, params: _AtPlace) -> tuple[Source, int, int]:
    """The text, and line and column from 1."""
    source = _source(server, params.text_document.uri)
    line = params.position.line + 1
    return source, line, _column(source.line(line), params.position.character)


def _publish(server: LanguageServer, uri: str) -> None:
    source = _source(server, uri)
    diagnostics = [_diagnostic(source, uri, finding) for finding in findings(source, editor_sizes)]
    server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, diagnostics))


def _source(server: LanguageServer, uri: str) -> Source:
    document = server.workspace.get_text_document(uri)
    return Source(document.filename or uri, document.source)


def _diagnostic(source: Source, uri: str, finding: Diagnostic) -> types.Diagnostic:
    related = [
        types.DiagnosticRelatedInformation(types.Location(uri, _range(source, label.span)), label.text)
        for label in finding.secondary
    ]
    return types.Diagnostic(
        range=_range(source, finding.primary.span),
        message=finding_words(finding),
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


_ANSWERS: dict[str, Callable[..., Any]] = {
    types.TEXT_DOCUMENT_DID_OPEN: _opened,
    types.TEXT_DOCUMENT_DID_CHANGE: _changed,
    types.TEXT_DOCUMENT_DID_CLOSE: _closed,
    types.TEXT_DOCUMENT_HOVER: _hover,
    types.TEXT_DOCUMENT_FORMATTING: _format,
    types.TEXT_DOCUMENT_COMPLETION: _complete,
    types.TEXT_DOCUMENT_DEFINITION: _define,
    types.TEXT_DOCUMENT_REFERENCES: _refer,
    types.TEXT_DOCUMENT_RENAME: _rename,
    types.TEXT_DOCUMENT_DOCUMENT_SYMBOL: _outline,
    types.TEXT_DOCUMENT_FOLDING_RANGE: _fold,
    types.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL: _colour,
    types.TEXT_DOCUMENT_INLAY_HINT: _hint,
    types.TEXT_DOCUMENT_SIGNATURE_HELP: _sign,
    types.TEXT_DOCUMENT_CODE_ACTION: _act,
    types.TEXT_DOCUMENT_CODE_LENS: _lens,
    "schedc/preview": _draw,
}
"""What answers each request of the protocol, and one of our own."""
_OPTIONS: dict[str, tuple[Any, ...]] = {
    types.TEXT_DOCUMENT_COMPLETION: (types.CompletionOptions(trigger_characters=[":", " "]),),
    types.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL: (types.SemanticTokensLegend(list(TOKEN_TYPES), []),),
    types.TEXT_DOCUMENT_SIGNATURE_HELP: (types.SignatureHelpOptions(trigger_characters=[" "]),),
}
