"""Lengths of a data set's documents in a file of int32, mapped into memory and read a window at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Int64
from schedc_runtime.errors import RuntimeFault

_BYTES = 4


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths of documents. values: [documents] tokens of each. name: of the file, for messages."""

    values: npt.NDArray[np.int32]
    name: str = "lengths"

    @classmethod
    def open(cls, path: str | os.PathLike[str], documents: int) -> Lengths:
        """Map a file of little-endian int32, one per document. documents: of the data set.

        Raises `RuntimeFault` for a file of another size, and for one that cannot be read.
        """
        remedy = "write one int32 per document: lengths.astype('<i4').tofile(path)"
        try:
            size = Path(path).stat().st_size
            if size != documents * _BYTES or not size:
                kind = "too short: " if size < documents * _BYTES else ""
                raise RuntimeFault(
                    f"{path} is {kind}{size} bytes, lengths of {documents} documents take {documents * _BYTES}", remedy
                )
            return cls(np.memmap(path, "<i4", "r"), str(path))
        except OSError as error:
            raise RuntimeFault(f"{path} cannot be read: {error.strerror}", remedy) from error

    @property
    def count(self) -> int:
        """Number of documents."""
        return int(self.values.size)

    def read(self, documents: Int64, most: int) -> Int64:
        """[n] lengths of these documents, in tokens. Raises `RuntimeFault` for one below 1 or above ``most``."""
        lengths = np.asarray(self.values[documents]).astype(np.int64)
        if wrong := np.flatnonzero((lengths < 1) | (lengths > most)).tolist():
            document, length = int(documents[wrong[0]]), int(lengths[wrong[0]])
            raise RuntimeFault(
                f"document {document} has {length} tokens by {self.name}, a row holds {most}",
                "cut longer documents, leave out empty ones, or give rows more tokens",
            )
        return lengths
