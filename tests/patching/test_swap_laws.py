"""Patched in place, an imported module behaves as one that imports the new text, or it is refused.

Each thing that a text can do while it is imported meets each change of a function, of any kind, in classes in classes.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_hwplugin.patching._errors import ReapplyRefused
from vllm_hwplugin.patching._overlay import Overlay
from vllm_hwplugin.patching._plan import patched_file
from vllm_hwplugin.patching._swap import patch_in_place

TEXT = """\
import functools


def wrapped(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments)
    return call


def called(function):
    function.result = function()
    return function


def first():
    return "first"


def second(value="x"):
    return "second" + value


def outer():
    return first()


class A:
    def __init__(self):
        self.value = "A.init"

    @staticmethod
    def static():
        return "A.static"

    def method(self):
        return "A.method"

    class B:
        def __init__(self):
            self.value = "B.init"

        @staticmethod
        def static():
            return "B.static"

        def method(self):
            return "B.method"

        class C:
            @classmethod
            def made(cls):
                return "C.made"

            @property
            def size(self):
                return "C.size"

        # in B

    # in A


class D(A):
    pass


# in the module
"""
LATER = "twelve = (lambda: first())"
# What a text can do while it is imported, and where it stands.
USES = {
    "# in the module": (
        "one = first()", "two = A.static()", "three = A.B.static()", "four = A().method()", "five = A.B.C.made()",
        "six = A.B.C().size", "seven = [second, A.B.static]", "def eight(value=first()):\n    return value",
        '@called\ndef nine():\n    return "nine"', "ten = second(first())", "eleven = A.B().method()",
        LATER, "here = A.B.C\nthirteen = here.made()", "fourteen = outer()",
        "fifteen = D().value", "sixteen = A.B().value", "seventeen = list(map(second, 'ab'))",
        "alias = first\neighteen = alias()", "table = [outer]\nnineteen = table[0]()",
        "for function in (second,):\n    twenty = function()", "second.attribute = first\nmore = second.attribute()",
        "@called\ndef call_first():\n    return first()", "class E(A):\n    pass\n\n\nlast = E().method()",
    ),
    "    # in A": ("    one = first()", "    two = B.static()", "    three = static()", "    four = B.C.made()"),
    "        # in B": (
        "        one = first()", "        two = C.made()", "        three = static()", "        four = C().size",
    ),
}  # fmt: skip
CHANGED = (
    "first",
    "A.init",
    "B.init",
    "second",
    "A.static",
    "A.method",
    "B.static",
    "B.method",
    "C.made",
    "C.size",
    "nine",
)
NAME = "law"


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Overlay:
    return Overlay({"VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))})


def imported(text: str, folder: Path) -> ModuleType:
    file = folder / f"{NAME}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(text, str(file), "exec", dont_inherit=True), vars(module))
    return module


def behaviour(scope: ModuleType | type, made: Any = None) -> Iterator[tuple[str, object]]:
    """What everything that is named there is, or gives when it is called."""
    for name, value in sorted(vars(scope).items()):
        where = f"{scope.__name__.rpartition('.')[2]}.{name}"
        if name.startswith("__") or isinstance(value, ModuleType):
            continue
        if isinstance(value, type):
            if name != "here":
                yield from behaviour(value, value())
        elif name not in ("wrapped", "called"):
            found = getattr(scope if made is None else made, name)
            if callable(found):
                yield where, found()
                yield f"{where}'s result", getattr(found, "result", None)
            else:
                yield (
                    where,
                    [item() if callable(item) else item for item in found] if isinstance(found, list) else found,
                )


@pytest.mark.parametrize(("place", "use"), [("", ""), *((place, use) for place, uses in USES.items() for use in uses)])
def test_it_behaves_as_the_new_text_or_is_refused(overlay: Overlay, place: str, use: str) -> None:
    text = TEXT.replace(f"{place}\n", f"{use}\n\n{place}\n") if use else TEXT
    folder, patched = overlay.base, set()
    for changed in CHANGED:
        new = text.replace(f'"{changed}"', '"changed"')
        module = imported(text, folder)
        copy = overlay.place(patched_file(f"{NAME}.py", NAME, new))
        try:
            patch_in_place(module, copy, str(folder / f"{NAME}.py"), text)
            patched.add(changed)
        except ReapplyRefused:
            new = text
        assert dict(behaviour(module)) == dict(behaviour(imported(new, folder))), changed
    # A property is refused in any text.
    assert patched >= {changed for changed in CHANGED if not may_reach(use, changed)} - {"C.size"}


def may_reach(use: str, changed: str) -> bool:
    """Whether a use names the function or a class around it, by itself or by what it calls."""
    *owner, name = changed.split(".")
    calls = use.replace("outer", "outer first").replace("D", "D A") if use != LATER else ""
    return not {name, *(part for part in "ABC" if owner and part <= owner[0])}.isdisjoint(re.findall(r"\w+", calls))
