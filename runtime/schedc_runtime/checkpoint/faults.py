"""Faults of checkpoints: each is a `MaterializeError` with the file, the name and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schedc_runtime.checkpoint.pickled import UnknownName
from schedc_runtime.errors import MaterializeError, RuntimeFault

FORMS = "a .safetensors or torch.save file, its .index.json, a directory with these, or a DCP directory"


def refused(path: Path | str, why: object, name: str = "") -> MaterializeError:
    """The error for the file ``path``, or for its tensor ``name``."""
    what = f"{path}: `{name}`" if name else str(path)
    return MaterializeError(
        f"{what} cannot be read: {str(why)[:400]}", f"write the checkpoint again; known are {FORMS}"
    )


@contextmanager
def reading(path: Path | str, name: str = "") -> Iterator[None]:
    """Turns whatever a reader raises for the bytes of a file into a `MaterializeError`.

    The first error is not chained: torch's own advises to read the file without any check.
    """
    try:
        yield
    except RuntimeFault:
        raise
    except UnknownName as error:
        raise MaterializeError(
            f"{path} asks for `{error}`, which no checkpoint needs; nothing of the file was run",
            "save the state dict alone: model.state_dict(), with tensors and plain values",
        ) from None
    except Exception as error:
        raise refused(path, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", name) from None


def inside_file(folder: Path, name: object) -> Path:
    """The file ``name`` of a checkpoint's folder.

    Raises `ValueError` if it lies elsewhere. Links may lead into the store of Hugging Face's cache, where files of a
    checkpoint lie in `blobs` beside its `snapshots`.
    """
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no name of a file")
    roots = [folder.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    path = folder / name
    if not any(path.resolve().is_relative_to(root) for root in roots):
        raise ValueError(f"{name!r} lies outside of the checkpoint's own folder {folder}")
    return path
