"""Counts the bytes of all storages that are alive behind each of torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedc_runtime.measure.held_bytes import alive


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """peak: the most bytes that were alive at once of storages made inside, those of ``others`` apart."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._others = list(others)
        self._known = {tensor.untyped_storage()._cdata for tensor in self._others}
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._storages.setdefault(storage._cdata, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, self.bytes())
        return result

    def bytes(self) -> int:
        """Those that are alive now."""
        total = 0
        for number, weak in list(self._storages.items()):
            if (storage := alive(weak)) is None:
                del self._storages[number]
            else:
                total += storage.nbytes()
        return total
