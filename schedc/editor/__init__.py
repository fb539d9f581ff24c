"""The language server: what `schedc check` and `schedc fmt` say, while a file is being written."""
