"""A module that is imported already gets the patched code in place, or is refused and stays as it was."""

from __future__ import annotations

import ast
import asyncio
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest

from vllm_hwplugin.patching._errors import ReapplyRefused
from vllm_hwplugin.patching._overlay import Copy, Overlay
from vllm_hwplugin.patching._plan import patched_file
from vllm_hwplugin.patching._swap import patch_in_place

NAME = "reapplied_module"

TEXT = '''\
"""A module."""
import asyncio
import functools

REGISTRY = []


def plain(value, extra=REGISTRY, *, key="k") -> int:
    """Stock."""
    return value


def fail():
    raise ValueError("stock")


def make():
    def inner():
        return "stock"
    return inner


def count():
    yield 1
    yield 2


async def later():
    return "stock"


class Parent:
    def greet(self):
        return "parent"


class Runner(Parent):
    """Runs."""

    def __init__(self):
        self.state = 1

    def greet(self):
        return "stock " + super().greet()

    def plainly(self):
        return "stock"

    @staticmethod
    def static():
        return "stock"

    @property
    def size(self):
        return 1

    @size.setter
    def size(self, value):
        self.state = value

    def __private(self):
        return "mangled stock"

    def call_private(self):
        return self.__private()
'''


class Live:
    """An imported module and its patched text."""

    def __init__(self, module: ModuleType, path: Path, overlay: Overlay) -> None:
        self.module, self.path, self.overlay = module, path, overlay

    def copy(self, *replacements: tuple[str, str], text: str = TEXT) -> Copy:
        for old, new in replacements:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return self.overlay.place(patched_file(f"{NAME}.py", NAME, text))

    def apply(self, *replacements: tuple[str, str]) -> Callable[[], None]:
        return self.apply_to(TEXT, *replacements)

    def apply_to(self, text: str, *replacements: tuple[str, str]) -> Callable[[], None]:
        """Where the installed file says `text`."""
        return patch_in_place(self.module, self.copy(*replacements, text=text), str(self.path), text)

    def says(self, text: str) -> None:
        self.path.write_text(text)
        self.module = importlib.reload(self.module)

    def refused(self, *replacements: tuple[str, str]) -> None:
        before = {name: value for name, value in vars(self.module).items() if name != "__builtins__"}
        codes = {name: value.__code__ for name, value in before.items() if isinstance(value, FunctionType)}
        # Without its traceback, which holds the frames that held the object which was in the way.
        refused = False
        try:
            self.apply(*replacements)
        except ReapplyRefused:
            refused = True
        assert refused
        assert {name: vars(self.module).get(name) for name in before} == before
        assert {name: vars(self.module)[name].__code__ for name in codes} == codes
        gc.collect()


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / f"{NAME}.py"
    path.write_text(TEXT)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(NAME)
    yield Live(module, path, Overlay())
    sys.modules.pop(NAME, None)


@pytest.fixture
def collections_that_parse() -> Iterator[None]:
    def parse(*_: object) -> None:
        ast.parse("1")

    thresholds = gc.get_threshold()
    gc.callbacks.append(parse)
    gc.set_threshold(10)
    yield
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(parse)


def test_collections_may_parse_meanwhile(live: Live, collections_that_parse: None) -> None:
    live.apply(("    return value", "    return value + 100"))
    assert live.module.plain(1) == 101
    assert gc.isenabled()


def test_a_wrapped_function_is_swapped_inside_its_wrapper(live: Live, decorators: None) -> None:
    text = 'from decorators import instrument\n\n@instrument\ndef f():\n    return "stock"\n'
    live.says(text)
    held = live.module.f
    live.apply_to(text, ("stock", "patched"))
    assert held() == "patched"


def test_new_imports_are_carried_out(live: Live) -> None:
    edits = (
        ("import functools\n", "import functools, colorsys\nfrom os import path as elsewhere, sep\n"),
        ("    return value", "    return colorsys.__name__, elsewhere.sep, sep"),
    )
    undo = live.apply(*edits)
    assert live.module.plain(5) == ("colorsys", "/", "/")
    undo()
    assert not {"colorsys", "elsewhere", "sep"} & vars(live.module).keys()
    live.module.sep = "another"  # type: ignore[attr-defined]
    live.refused(*edits)


FAIL = 'def fail():\n    raise ValueError("stock")\n'
# Each of these ran once, while the module was imported.
REFUSED = {
    "state": ("REGISTRY = []", "REGISTRY = [1]"),
    "a signature": ("def plain(value, extra", "def plain(value, more=1, extra"),
    "a coroutine": ("def fail():", "async def fail():"),
    "a decorator more": ("def fail():", "@functools.cache\ndef fail():"),
    "a function more": ("def fail():", "def more(): ...\n\n\ndef fail():"),
    "a class of that name": (FAIL, "class fail: ...\n"),
    "a method more": ("    @staticmethod", "    def more(self): ...\n\n    @staticmethod"),
    "an attribute of a class": ('    """Runs."""', '    """Runs."""\n    limit = 1'),
    "other bases": ("class Runner(Parent):", "class Runner(Parent, dict):"),
    "a decorated class": ("class Runner(Parent):", "@functools.total_ordering\nclass Runner(Parent):"),
    "a future": ("import functools\n", "from __future__ import annotations\nimport functools\n"),
    "a variable more is closed over": (
        'def plainly(self):\n        return "stock"',
        "def plainly(self):\n        return super().greet()",
    ),
    "a property": ("        return 1", "        return 100"),
    "a private method": ("mangled stock", "mangled patched"),
    "an import that fails": ("import functools", "import functools\nimport there_is_no_such_module"),
}


def test_a_check_changes_nothing(live: Live) -> None:
    before = dict(vars(live.module))
    edits = (("import functools\n", "import functools\nimport colorsys\n"), ("    return value", "    return -value"))
    patch_in_place(live.module, live.copy(*edits), str(live.path), TEXT, only_check=True)()
    assert vars(live.module) == before
    assert live.module.plain(1) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_more_than_a_body_is_refused(live: Live, name: str) -> None:
    live.refused(REFUSED[name])


F = "def f():\n    return 1\n"
G = "def g():\n    return f()\n"
# `C` is made without its name.
C = "class C(B):\n    def __init__(self):\n        self.x = 1\ndef make():\n    return MADE.pop()()\nheld = make().x"
# A text whose 1 others may hold, or an import may have read.
HELD = {
    "a cached function": "@functools.cache\ndef f():\n    return 1",
    "a kernel": "@jit\ndef f():\n    return 1",
    "an unknown class decorator": "@known\nclass C:\n    def f(self):\n        return 1",
    "around a class": "@known\nclass D:\n    class C:\n        def f(self):\n            return 1",
    "what compiling holds": "@support_torch_compile\nclass C:\n    def forward(self):\n        return 1",
    "a hook of classes": "class C:\n    def __init_subclass__(cls):\n        cls.x = 1",
    "a used function": f"{F}held = f()",
    "over two functions": f"{F}{G}def h():\n    return g()\nheld = h()",
    "a class with it": "class C:\n    def f(self):\n        return 1\nheld = C()",
    "a class that calls it": f"{F}class C:\n    def g(self):\n        return f()\nheld = C()",
    "a subclass": "class C:\n    def f(self):\n        return 1\nclass D(C):\n    pass\nheld = D()",
    "an argument": f"{F}{G}held = list(map(id, [g]))",
    "a default": f"{F}def g(call=f):\n    return call()\nheld = g()",
    "another name": f"{F}alias = f\nheld = alias()",
    "a table": f"{F}{G}table = {{}}\ntable[0] = g\nheld = table[0]()",
    "a loop": f"{F}held = [call() for call in (f,)]",
    "a decorator of the module": f"{F}def call(function):\n    return function()\nalias = call\n@alias\n{G}",
    "a look-up": f"{F}def g(name):\n    return globals()[name]()\nheld = g('f')",
    "a hook that keeps classes": f"MADE = []\nclass B:\n    def __init_subclass__(cls):\n        MADE.append(cls)\n{C}",
    "a metaclass": f"""\
MADE = []
class M(type):
    def __init__(cls, *given):
        MADE.append(cls)
class B(metaclass=M):
    pass
{C}""",
}
# No part of an import of these comes to `f`.
FREE = {
    "a class without methods": "@dataclass\nclass C:\n    call: object\ndef g():\n    return 3\nheld = C(g)",
    "another method of that name": "class C:\n    def f(self):\n        return 3\nheld = C()",
    "a caller of others": "def g():\n    return h()\ndef h():\n    return 3\nheld = g()",
    "a decorator of others": "def d(function):\n    return function\n@d\ndef g():\n    return 3",
    "a table that no call reads": "table = [f]\ndef g():\n    return table[0]()",
}


@pytest.fixture
def decorators(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("decorators")
    for name in ("jit", "known", "support_torch_compile"):
        setattr(module, name, lambda decorated: decorated)
    module.instrument = lambda function: functools.wraps(function)(lambda: function())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "decorators", module)


@pytest.mark.parametrize("name", HELD)
def test_a_body_that_others_may_hold_is_refused(live: Live, name: str, decorators: None) -> None:
    text = f"import functools\nfrom decorators import *\n{HELD[name]}\n"
    live.says(text)
    with pytest.raises(ReapplyRefused):
        live.apply_to(text, ("1", "2"))


@pytest.mark.parametrize("name", FREE)
def test_a_body_that_an_import_cannot_have_read_is_patched(live: Live, name: str) -> None:
    text = f"from dataclasses import dataclass\n{F}{FREE[name]}\n"
    live.says(text)
    held = live.module.f
    live.apply_to(text, ("return 1", "return 2"))
    assert held() == 2


PLAIN = ("    return value", "    return -value")


def other_code(module: ModuleType) -> CodeType:
    """Of the same name and line."""
    code: CodeType = module.plain.__code__
    return code.replace(co_consts=(*code.co_consts, "another"))


OBSTACLES: dict[str, tuple[Callable[[ModuleType], object], tuple[str, str]]] = {
    "another function": (lambda module: setattr(module, "plain", lambda value: value), PLAIN),
    "other code": (lambda module: setattr(vars(module)["plain"], "__code__", other_code(module)), PLAIN),
    "a cached function": (lambda module: setattr(module, "plain", functools.lru_cache(vars(module)["plain"])), PLAIN),
    "another class": (
        lambda module: setattr(module, "Runner", type("Other", (), {"greet": vars(module)["Runner"].greet})),
        ('"stock " + super()', '"x" + super()'),
    ),
    "an import under way": (lambda module: setattr(module.__spec__, "_initializing", True), PLAIN),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_module_that_is_not_what_its_text_says_is_refused(live: Live, obstacle: str) -> None:
    make, edit = OBSTACLES[obstacle]
    live.apply(edit)()
    make(live.module)
    live.refused(edit)


def test_a_living_closure_is_refused(live: Live) -> None:
    inner = live.module.make()
    live.refused(('return "stock"\n    return inner', 'return "patched"\n    return inner'))
    del inner
    live.apply(('return "stock"\n    return inner', 'return "patched"\n    return inner'))
    assert live.module.make()() == "patched"


def test_an_object_that_the_old_text_set_up_is_refused(live: Live) -> None:
    class Derived(live.module.Runner):  # type: ignore[name-defined,misc]
        pass

    runner = Derived()
    edit = ("self.state = 1", "self.state = self.more = 1")
    live.refused(edit)
    del runner
    live.apply(edit)
    assert Derived().more == 1


def test_an_object_that_is_made_during_the_new_imports_is_seen(live: Live) -> None:
    """The imports take time, in which another thread may make objects by the old text."""
    (live.path.parent / "slow_import.py").write_text(f"import {NAME}\nMADE = {NAME}.Runner()\n")
    live.refused(("import functools\n", "import functools, slow_import\n"), ("self.state = 1", "self.state = 2"))
    assert sys.modules.pop("slow_import").MADE.state == 1


def test_what_goes_on_keeps_its_body_until_it_ends(live: Live) -> None:
    text = TEXT.replace("    return value", "    return value(), 'stock'")
    live.says(text)
    running, waiting = live.module.count(), live.module.later()
    next(running)

    def swap() -> None:
        edits = (
            ("'stock'", "'patched'"),
            ("yield 2", "yield 3"),
            ('later():\n    return "stock"', 'later():\n    return "new"'),
        )
        live.apply_to(text, *edits)

    assert live.module.plain(swap) == (None, "stock")
    assert live.module.plain(int) == (0, "patched")
    assert (list(running), list(live.module.count())) == ([2], [1, 3])
    assert (asyncio.run(waiting), asyncio.run(live.module.later())) == ("stock", "new")
