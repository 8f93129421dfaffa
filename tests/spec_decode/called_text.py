# SPDX-License-Identifier: Apache-2.0
"""Methods of a released text of vLLM, called by themselves; a stand-in answers to every name that they use."""

from __future__ import annotations

import ast
import builtins
import difflib
import functools
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any


class Seen:
    """Anything of vLLM's: its attributes, items and results are of this class, and calls are taken down by name.

    It is true, an instance of every class, and equal to any other; the text says into how many names it is unpacked.

    Args:
        name: what it is, as the text spells it.
        text: the text that is run.
    """

    def __init__(self, name: str, text: Text) -> None:
        vars(self).update(_name=name, _text=text)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        text = self._text
        vars(self)[name] = text.facts[name] if name in text.facts else Seen(f"{self._name}.{name}", text)
        return vars(self)[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [repr(one) for one in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
        # What has no name of its own has an address.
        self._text.calls.append(re.sub(" at 0x[0-9a-f]+", "", f"{self._name}({', '.join(given)})"))
        result = f"{self._name}()"
        return self._text.facts.get(result.rpartition(".")[2], Seen(result, self._text))

    def __getitem__(self, key: Any) -> Any:
        # An index of rows and columns says the same as one of rows and then one of columns.
        if isinstance(key, tuple) and not isinstance(key[0], slice):
            return self[key[0]][(slice(None), *key[1:])]
        return Seen(f"{self._name}[{key!r}]", self._text)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._text.calls.append(f"{self._name}[{key!r}] = {value!r}")

    def __iter__(self) -> Iterator[Any]:
        return (self[one] for one in range(self._text.unpacked.get(_last(self._name), 0)))

    def __repr__(self) -> str:
        return self._name

    def __instancecheck__(self, one: Any) -> bool:
        return isinstance(one, Seen)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return 0

    def __index__(self) -> int:
        return 1

    def __contains__(self, one: Any) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seen)

    def __hash__(self) -> int:
        return 0

    def __lt__(self, other: Any) -> bool:
        return False

    def __le__(self, other: Any) -> bool:
        return True

    def __add__(self, other: Any) -> Any:
        return self

    __gt__, __ge__ = __lt__, __le__
    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = __truediv__ = __add__
    __mod__ = __or__ = __and__ = __add__


def _last(name: str) -> str:
    """The last part of a name; the plugin's methods have the names of vLLM's private ones."""
    return name.rpartition(".")[2].lstrip("_")


@functools.cache
def parsed(text: str, owner: str) -> tuple[dict[str, ast.FunctionDef], dict[str, int]]:
    """The methods of a class, and the last part of a name -> the number of names that the text unpacks it into."""
    (found,) = (one for one in ast.parse(text).body if isinstance(one, ast.ClassDef) and one.name == owner)
    unpacked: dict[str, int] = {}
    for node in ast.walk(found):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            for value in ast.walk(node.value):
                if isinstance(value, ast.Call | ast.Attribute):
                    call = "()" if isinstance(value, ast.Call) else ""
                    name = ast.unparse(value.func if isinstance(value, ast.Call) else value)
                    unpacked.setdefault(_last(name) + call, len(node.targets[0].elts))
    methods = {one.name: one for one in found.body if isinstance(one, ast.FunctionDef)}
    return methods, unpacked


class Text:
    """The methods of one class of a module's text, each of which can be called by itself.

    Attributes:
        facts: last part of a name -> its value; with `()`, what a call of it returns. Anything else is a `Seen`.
        unpacked: see `parsed`.
        calls: what was called, in order.
        code: the lines of the methods that were called.
        lines: those that ran.
    """

    def __init__(self, text: str, owner: str, facts: Mapping[str, Any]) -> None:
        # One request is new to each step, and layers are of one group.
        one_each = {"scheduled_new_reqs": "new", "_kv_cache_spec_attn_group_iterator()": "group"}
        self.facts = {name: [Seen(item, self)] for name, item in one_each.items()} | dict(facts)
        self.calls: list[str] = []
        self.code: set[int] = set()
        self.lines: set[int] = set()
        self._methods, self.unpacked = parsed(text, owner)

    def methods_at(self, lines: set[int]) -> set[str]:
        """The names of the methods that these lines are in."""
        spans = {name: range(one.lineno, (one.end_lineno or 0) + 1) for name, one in self._methods.items()}
        return {name for name, span in spans.items() if not lines.isdisjoint(span)}

    def run(self, name: str, owner: Seen, **given: Any) -> Any:
        """Call a method of `owner`, with stand-ins for what it names and for the arguments that are not `given`."""
        method = self._methods[name]
        method.decorator_list = []
        names = {one.id for one in ast.walk(method) if isinstance(one, ast.Name)} - vars(builtins).keys()
        namespace: dict[str, Any] = {one: Seen(one, self) for one in names}
        namespace["__builtins__"] = {**vars(builtins), "__import__": self._import, "super": Seen("super", self)}
        unevaluated = compile("from __future__ import annotations", "flags", "exec").co_flags
        exec(compile(ast.Module([method], []), "patched", "exec", unevaluated, dont_inherit=True), namespace)
        self.code |= set(_lines_of(namespace[name].__code__))
        required = method.args.args[1 : len(method.args.args) - len(method.args.defaults)]
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return namespace[name](owner, **{one.arg: Seen(one.arg, self) for one in required} | given)
        finally:
            sys.settrace(before)

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name.startswith("vllm_hwplugin"):
            return builtins.__import__(name, globals, locals, fromlist, level)
        return types.SimpleNamespace(**{item: Seen(item, self) for item in fromlist or ()})

    @property
    def names(self) -> set[str]:
        """What was called, without its arguments."""
        return {re.split(r"[(\[]", call)[0] for call in self.calls}

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != "patched":
            return None
        if event == "line":
            self.lines.add(frame.f_lineno)
        return self._trace


def added_lines(stock: str, patched: str) -> set[int]:
    """The numbers of lines of the patched text that the stock one has not."""
    changes = difflib.SequenceMatcher(None, stock.splitlines(), patched.splitlines()).get_opcodes()
    return {line + 1 for kind, _, _, start, end in changes if kind != "equal" for line in range(start, end)}


def _lines_of(code: types.CodeType) -> Iterator[int]:
    yield from (line for *_, line in code.co_lines() if line is not None)
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _lines_of(one)
