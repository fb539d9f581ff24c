"""The rules of a device that a CPU does not have, as a table, and a dispatch mode that gives them to a CPU.

    rule        a device                                               found where it matters
    ----------  -----------------------------------------------------  ------------------------------------------
    fresh       has anything in memory that was not written            buffers of rows, blocks, `scatter_` targets
    bags        runs the last bag on to the last entry                 moe/bags.py
    duplicates  keeps another one of entries for one place             moe/trees.py
    sums        adds floats for one place in another order             backward of gathers, head_loss/chunks.py
    embedding   adds the rows of a word in another order               stage/recipes.py
    ties        chooses another one of equal entries                   moe/router.py, moe/counts.py
    unwritten   leaves rows behind the last end as they were           moe/products.py
    operands    takes 16-byte addresses and strides, and int32 ends    moe/products.py
    decomposed  has products in the type of their sum                  head_loss/chunks.py
    narrow      rounds operands to TF32, and sums to 16 bits           every product, unless torch is set otherwise
    ranges      ends its context at an index out of range              moe/trees.py, moe/counts.py, batches
    whole       wraps round beyond 2^31                                moe/products.py
    pinned      takes pinned memory in powers of two, and keeps it     offload/host_buffers.py
    pageable    has no pinned memory: copies wait                      offload/host_buffers.py

A rule counts the calls that it concerns, and `pinned` the blocks that had to be made. Sources: what torch documents of
each operation, and aten/src/ATen/native/cuda (EmbeddingBag, ScatterGatherKernel, Embedding, GroupedBlas).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schedc_runtime.device import kernel_rules as kernels
from schedc_runtime.device import order_rules as orders
from schedc_runtime.device.rule_calls import Onward, RuledCall, is_plain, name_of

_SCATTERS = ("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
_INDEXED = ("index_copy", "index_copy_", "index_add", "index_add_")
_PUTS = ("index_put", "index_put_", "_index_put_impl_")
_WHOLE = ("add", "sub", "mul", "neg", "rsub", "sum", "prod", "cumsum", "cumprod", "scatter_add", "index_add", "copy")


class DeviceRule(NamedTuple):
    """A rule of a device.

    name: see the table. operations: without overload and ``aten::``. apply: gives what the device gives; None where
    the simulated device has the rule itself. when: whether the rule concerns a call. keeps_bits: whether a right
    program has the bits of a CPU under it.
    """

    name: str
    operations: tuple[str, ...]
    apply: Callable[[RuledCall, Onward], Any] | None
    when: Callable[[RuledCall], bool] = lambda call: True
    keeps_bits: bool = True


RULES = (
    DeviceRule("ranges", (*_SCATTERS, *_INDEXED, *_PUTS, "index_select", "gather", "index", "take", "embedding",
        "embedding_dense_backward", "_embedding_bag", "_embedding_bag_forward_only", "nll_loss_forward"),
        kernels.ranges),
    DeviceRule("fresh", ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"),
        kernels.fresh),
    DeviceRule("bags", ("_embedding_bag", "_embedding_bag_forward_only"), orders.bags),
    DeviceRule("duplicates", ("scatter", "scatter_", "index_copy", "index_copy_", *_PUTS), orders.another_wins,
        orders.keeps_one),
    DeviceRule("sums", (*_SCATTERS, "index_add", "index_add_", *_PUTS), orders.another_order, orders.adds_floats),
    DeviceRule("embedding", ("embedding_dense_backward",), orders.embeddings, keeps_bits=False),
    DeviceRule("ties", ("topk", "sort", "kthvalue"), orders.ties, orders.breaks_ties),
    DeviceRule("unwritten", ("_grouped_mm",), kernels.left_as_they_were, kernels.groups_rows),
    DeviceRule("operands", ("_grouped_mm",), kernels.operands),
    DeviceRule("decomposed", ("mm", "addmm", "bmm", "baddbmm"), kernels.decomposed, kernels.sums_in_another_type),
    DeviceRule("narrow", ("mm", "addmm", "addmm_", "bmm", "baddbmm", "convolution", "convolution_backward"),
        kernels.narrow, kernels.may_be_narrow, keeps_bits=False),
    DeviceRule("whole", (*_WHOLE, *(f"{name}_" for name in _WHOLE), "arange", "_to_copy"), kernels.whole,
        kernels.is_whole),
    DeviceRule("pinned", (), None),
    DeviceRule("pageable", (), None, keeps_bits=False),
)  # fmt: skip
"""In the order in which they see a call. Checks come first: a later rule may change the call."""

EVERY = "every"
"""All rules under which a right program keeps the bits of a CPU; none of them has to be met."""


class DeviceRules:
    """The rules that hold in a run. names: of `RULES`, each of which has to be met; or `EVERY`."""

    def __init__(self, names: str | Iterable[str]) -> None:
        known = {rule.name: rule for rule in RULES}
        self.named = () if names == EVERY else (names,) if isinstance(names, str) else tuple(names)
        if unknown := [name for name in self.named if name not in known]:
            raise ValueError(f"rules={unknown[0]!r}: possible: {EVERY}, {', '.join(known)}")
        self.rules = [rule for rule in RULES if rule.name in self.named or (names == EVERY and rule.keeps_bits)]
        self.met: Counter[str] = Counter()
        """By rule: the calls that it concerned."""

        self._blocks: dict[int, int] = {}

    def __contains__(self, name: object) -> bool:
        return any(rule.name == name for rule in self.rules)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a device gives for an operation."""
        name, onward = name_of(func), RuledCall.run
        if not all(is_plain(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
            return func(*args, **kwargs)
        for rule in reversed(self.rules):
            if rule.apply is not None and name in rule.operations:
                onward = partial(self._under, rule, onward=onward)
        return onward(RuledCall(func, args, kwargs))

    def _under(self, rule: DeviceRule, call: RuledCall, onward: Onward) -> Any:
        if rule.apply is None or not rule.when(call):
            return onward(call)
        self.met[rule.name] += 1
        return rule.apply(call, onward)

    def block(self, count: int) -> int:
        """Bytes of the block of pinned memory that serves ``count`` bytes, for `give`: a power of two."""
        size = 1 << max(0, count - 1).bit_length()
        if self._blocks.get(size):
            self._blocks[size] -= 1
        else:
            self.met["pinned"] += 1
        return size

    def give(self, size: int) -> None:
        """Keep a block for others that ask for as much."""
        self._blocks[size] = self._blocks.get(size, 0) + 1

    def unmet(self) -> list[str]:
        """The named rules that no call has met: a run shows nothing of them."""
        return [name for name in self.named if not self.met[name]]


class RuledOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives operations on a CPU the semantics of a device."""

    sees_twins = True
    """A twin is what runs on a device without a kernel: its operations are ruled, and not the whole."""

    def __init__(self, rules: DeviceRules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rules = rules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._rules.call(func, args, kwargs or {})
