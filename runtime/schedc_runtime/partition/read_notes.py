"""Notes what Python reads between units while a model is recorded: attributes, globals, closures and defaults.

Attributes are noted by a ``__getattribute__`` that classes have while a model is recorded: `nn.Module`, and the classes
of the objects that are reached from what was read. The rest follows from the code of the functions that run. Code of
units, and of torch, is not looked at.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.partition.code_names import NamePath, Store, code_names
from schedc_runtime.partition.frozen import MISSING, PLAIN, contents, frozen, same_value
from schedc_runtime.partition.reads import Noted, Place, Read
from schedc_runtime.partition.structure import path_of
from schedc_runtime.partition.user_line import (
    attributes_of,
    home_of_value,
    is_known,
    is_users,
    keeps_attributes,
    unbound_attribute,
    user_line,
)

Identity = tuple[int, str, bool]
_DEPTH = 4
"""How deep containers are searched for objects."""
_TABLES = ("_parameters", "_buffers", "_modules")
_MODULES_OWN = ("training", "_parameters", "_buffers")
"""Attributes of modules that are compared elsewhere, or are read entry by entry."""
_SWITCHES = sys.version_info < (3, 12)
"""Whether a profile function can be set and removed often: later versions of Python then prepare all code anew."""


class ReadNotes:
    """The reads of one forward of ``model``.

    `noting` surrounds the forward; only code inside of `switched(True)` is looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.on = model, False
        self._noted: dict[Identity, Noted] = {}
        self._own: set[Identity] = set()
        """Identities of attributes that the forward set before the first read."""
        self._watched: dict[int, tuple[Any, str]] = {}
        for name, module in model.named_modules():
            self._watched.setdefault(id(module), (module, name))
        self._functions: dict[CodeType, dict[int, FunctionType]] = {}
        self._code: dict[CodeType, dict[str, Any]] = {}
        """The globals of each code that has run."""
        self._patched: dict[type, dict[str, Any]] = {}
        self._profiles = False

    # Around the forward.

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Classes note reads inside. The garbage collector waits: its callbacks and finalizers are not the model's."""
        collects = gc.isenabled()
        gc.disable()
        self._profiles = sys.getprofile() is None  # else frames are looked at where something else happens
        try:
            self._patch(nn.Module)
            hooks = vars(torch.nn.modules.module)
            for name in [name for name in hooks if name.startswith("_global_")]:
                self._note(name, hooks, name, True)
            type(os.environ).__getitem__ = self._environment  # type: ignore[method-assign, assignment]
            if self._profiles and not _SWITCHES:
                sys.setprofile(self._called)
            with self.switched(True):
                yield
        finally:
            if self._profiles:
                sys.setprofile(None)
            if collects:
                gc.enable()
            type(os.environ).__getitem__ = _ENVIRONMENT  # type: ignore[method-assign]
            for kind, own in self._patched.items():
                for name in ("__getattribute__", "__setattr__"):
                    setattr(kind, name, own[name]) if name in own else delattr(kind, name)

    @contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Whether code inside is looked at."""
        before = self.on
        self._switch(on)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, on: bool) -> None:
        if self._profiles and _SWITCHES and on != self.on:
            sys.setprofile(self._called if on else None)
        self.on = on

    def reads(self) -> list[Read]:
        """What the recording depends on, behind the forward. Raises `PartitionError` as `Noted.counts`."""
        return [noted.read for noted in self._noted.values() if noted.counts(self.model)]

    def ran(self) -> list[CodeType]:
        """The code between units that has run, torch's excepted."""
        return [code for code in self._code if is_users(code)]

    @contextmanager
    def put_back_behind(self) -> Iterator[None]:
        """Restores, behind the forward, read values that the forward would keep for a later forward."""
        try:
            yield
        finally:
            for noted in self._noted.values():
                noted.put_back()

    def _environment(self, name: str) -> str:
        """``os.environ[name]``, noted."""
        if self.on and isinstance(name, str):
            with self._quietly():
                table: Any = vars(os.environ)["_data"]
                self._note(f"os.environ.{name}", table, os.environ.encodekey(name), True)
        return _ENVIRONMENT(os.environ, name)

    # Reads of attributes.

    def _patch(self, kind: type) -> bool:
        """Let a class note reads; whether it can."""
        if kind in self._patched:
            return True
        get: Callable[..., Any] = kind.__getattribute__
        put: Callable[..., Any] = kind.__setattr__
        notes = self

        def __getattribute__(self: Any, name: str) -> Any:
            if not notes.on or id(self) not in notes._watched:
                return get(self, name)
            try:
                value = get(self, name)
            except AttributeError:
                notes._attribute(self, name, MISSING, sys._getframe(1))
                raise
            notes._attribute(self, name, value, sys._getframe(1))
            return value

        def __setattr__(self: Any, name: str, value: Any) -> None:
            if notes.on and id(self) in notes._watched:
                notes._set(self, name, sys._getframe(1))
            put(self, name, value)

        own = {name: vars(kind)[name] for name in ("__getattribute__", "__setattr__") if name in vars(kind)}
        try:
            kind.__getattribute__ = __getattribute__  # type: ignore[method-assign, assignment]
            kind.__setattr__ = __setattr__  # type: ignore[method-assign, assignment]
        except (TypeError, AttributeError):
            return False
        self._patched[kind] = own
        return True

    def _attribute(self, owner: Any, name: str, value: Any, frame: FrameType) -> None:
        with self._quietly():
            if not self._profiles:
                self._stack(frame)
            own = attributes_of(owner)
            path = self._watched[id(owner)][1]
            place = (frame.f_code, frame.f_lineno)
            if name == "__dict__" and own is not None and is_users(frame.f_code):
                for key in list(own):
                    self._note(path_of(path, key), own, key, True, place)
            if name.startswith("__") or (name in _MODULES_OWN and isinstance(owner, nn.Module)):
                return
            label = path_of(path, name)
            unbound = unbound_attribute(type(owner), name)
            if isinstance(unbound, MemberDescriptorType) or own is None:
                self._note(label, owner, name, False, place)
                return
            if isinstance(owner, nn.Module) and value is MISSING and unbound is MISSING:
                held = [own[table] for table in _TABLES if name in own.get(table, ())]
                for table in held or [own, *(own[table] for table in _TABLES if table in own)]:
                    self._note(label, table, name, True, place)
                return
            if name not in own and unbound is MISSING and value is not MISSING:  # a `__getattribute__` of its own
                for key in list(own):
                    self._note(path_of(path, key), own, key, True, place)
            if name in own or unbound is MISSING or not is_known(home_of_value(type(owner), name)):
                self._note(label, own, name, True, place)
            if name not in own:
                self._of_class(type(owner), name)

    def _of_class(self, kind: type, name: str) -> None:
        """A read of an attribute that a class has. Those of torch and Python itself do not change."""
        unbound = unbound_attribute(kind, name)
        if unbound is MISSING or is_known(home_of_value(kind, name)) or isinstance(unbound, classmethod):
            return
        label = f"{kind.__module__}.{kind.__qualname__}.{name}"
        self._note(label, kind, name, False)
        for function in (unbound, getattr(unbound, "fget", None), getattr(unbound, "func", None)):
            self._watch(function, label)

    def _set(self, owner: Any, name: str, frame: FrameType) -> None:
        own = attributes_of(owner)
        identity = (id(owner), name, False) if own is None else (id(own), name, True)
        if identity in self._noted:
            self._noted[identity].updates.setdefault((frame.f_code, frame.f_lineno), user_line())
        else:
            self._own.add(identity)

    # Reads of code.

    def _called(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and self.on and frame.f_code not in self._code:
            self._frame(frame)

    def _stack(self, frame: FrameType | None) -> None:
        """The frames on the stack, where another profiler does not let calls be seen."""
        while frame is not None and frame.f_code is not _NOTING:
            if frame.f_code not in self._code:
                self._frame(frame)
            frame = frame.f_back

    def _frame(self, frame: FrameType) -> None:
        code = frame.f_code
        self._ran(code, frame.f_globals, frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None)

    def _ran(self, code: CodeType, table: dict[str, Any], owner: Any) -> None:
        """Notes the reads of running code. table: its globals. owner: its first argument, or None."""
        self._code[code] = table
        if not is_users(code):
            return
        with self._quietly():
            names = code_names(code, table.get("__package__") or "")
            if owner is not None:
                self._of_owner(owner if isinstance(owner, type) else type(owner), code, names.attributes)
            for chain in names.chains:
                first = chain.names[0]
                if chain.kind == "module" and first in sys.modules:
                    self._follow(code, chain, sys.modules[first], first)
                elif chain.kind == "global" and first in table:
                    label = f"{table.get('__name__')}.{first}"
                    self._note(label, table, first, True, (code, chain.line))
                    self._updated((id(table), first, True), code, names.stores)
                    self._follow(code, chain, table[first], label)
            for function in list(self._functions.get(code, {}).values()):
                self._closure(function)

    def _of_owner(self, kind: type, code: CodeType, attributes: Collection[str]) -> None:
        """The function of a method that runs, and the values that its class has under names in its code."""
        for base in kind.__mro__:
            unbound = vars(base).get(code.co_name)
            if unbound is not None:
                self._watch(getattr(unbound, "__func__", unbound), f"{base.__qualname__}.{code.co_name}")
        for name in attributes:
            unbound = unbound_attribute(kind, name)
            if isinstance(unbound, PLAIN) or contents(unbound) is not None:
                self._of_class(kind, name)

    def _follow(self, code: CodeType, chain: NamePath, value: Any, label: str) -> None:
        """Note the attributes of a chain from ``value`` on, which its first name has given."""
        for name in chain.names[1:]:
            label = f"{label}.{name}"
            if isinstance(value, type):
                self._of_class(value, name)
            elif isinstance(value, FunctionType) or (isinstance(value, ModuleType) and not is_known(value)):
                self._note(label, vars(value), name, True, (code, chain.line))
            else:
                return
            value = getattr(value, name, None)

    def _closure(self, function: FunctionType) -> None:
        """Notes the defaults, and the values of closed-over names, of a function that runs."""
        code = function.__code__
        label = f"{function.__module__}.{function.__qualname__}"
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self._note(f"{label}.{name}", function, name, False)
        names = code_names(code, function.__globals__.get("__package__") or "")
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        for chain in names.chains:
            first = chain.names[0]
            if chain.kind == "cell" and first != "__class__":
                self._note(f"{label}.{first}", cells[first], "cell_contents", False, (code, chain.line))
                self._updated((id(cells[first]), "cell_contents", False), code, names.stores)
                with suppress(ValueError):
                    self._follow(code, chain, cells[first].cell_contents, f"{label}.{first}")

    def _updated(self, identity: Identity, code: CodeType, stores: Collection[Store]) -> None:
        """Code that reads a global, or a cell of a closure, may set it as well."""
        if (noted := self._noted.get(identity)) is not None:
            kind, key = ("global", identity[1]) if identity[2] else ("cell", noted.read.name.rpartition(".")[2])
            lines = [store.line for store in stores if (store.kind, store.name) == (kind, key)]
            noted.updates |= {(code, line): f"\n  --> {code.co_filename}:{line}" for line in lines}

    # What was read.

    def _note(self, name: str, holder: Any, key: str, table: bool, place: Place | None = None) -> None:
        identity = id(holder), key, table
        if identity in self._own:
            return
        if (noted := self._noted.get(identity)) is None:
            read = Read(name, holder, key, table)
            value = read.now()
            if isinstance(value, ModuleType) or (isinstance(value, (FunctionType, type)) and is_known(value)):
                return
            if not self._watch(value, name):
                read = Read(name, holder, key, table, user_line() or " ")
            noted = self._noted[identity] = Noted(read)
        if place is not None:
            noted.places.add(place)

    def _watch(self, value: Any, name: str, depth: int = _DEPTH) -> bool:
        """Note what is read of an object from now on; whether all changes of it can be seen."""
        if isinstance(value, (*PLAIN, Tensor, ModuleType, type)) or value is MISSING or id(value) in self._watched:
            return True
        if isinstance(value, FunctionType):
            self._function(value)
            return True
        if isinstance(value, MethodType):
            self._watch(value.__func__, name, depth)
            return self._watch(value.__self__, name, depth)
        if (inner := contents(value)) is not None:
            watched = [self._watch(item, name, depth - 1) for item in inner[1]] if depth else []
            return all(watched)
        if isinstance(value, nn.Module):
            self._watched[id(value)] = value, name
            return True
        if same_value(frozen(value), frozen(value)) and frozen(value) is not value:  # a set, or a small array
            return True
        return self._watch_object(value, name)

    def _watch_object(self, value: Any, name: str) -> bool:
        kind = type(value)
        if keeps_attributes(kind) and not isinstance(value, (Enum, BaseException)) and self._patch(kind):
            self._watched[id(value)] = value, name
            return True
        return is_known(kind) and not hasattr(kind, "__next__") and kind.__module__ != "numpy"

    def _function(self, function: FunctionType) -> None:
        """Watches a function that may run, and the functions in its closure."""
        known = self._functions.setdefault(function.__code__, {})
        if id(function) in known:
            return
        known[id(function)] = function
        for cell in function.__closure__ or ():
            with suppress(ValueError):
                if isinstance(cell.cell_contents, (FunctionType, MethodType)):
                    self._watch(cell.cell_contents, function.__qualname__)
        code = function.__code__
        if not self._profiles and code not in self._code and "site-packages" not in code.co_filename:
            self._ran(code, function.__globals__, None)  # it may run, and nobody will tell
        elif code in self._code and is_users(code):
            self._closure(function)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


_ENVIRONMENT = type(os.environ).__getitem__
_NOTING = ReadNotes.noting.__wrapped__.__code__  # type: ignore[attr-defined]


def paused(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a recorder, inside of which nothing is noted."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.notes.switched(False):
            return method(self, *args, **kwargs)

    return run
