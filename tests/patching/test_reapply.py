"""A module that is imported already gets the patched code in place, or is refused and stays as it was."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import inspect
import linecache
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

from vllm_hwplugin.patching._overlay import Copy, Overlay, open_overlay
from vllm_hwplugin.patching._plan import patched_file
from vllm_hwplugin.patching._reapply import ReapplyRefused, importers_of, plan_module

NAME = "reapplied_module"

TEXT = '''\
"""A module."""
import functools
from contextlib import contextmanager

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


@contextmanager
def managed():
    yield "stock"


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

    @classmethod
    def made(cls):
        return "stock " + cls.__name__

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

    def copy(self, *replacements: tuple[str, str]) -> Copy:
        text = TEXT
        for old, new in replacements:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return self.overlay.place(patched_file(f"{NAME}.py", NAME, text))

    def apply(self, *replacements: tuple[str, str]) -> Callable[[], None]:
        return plan_module(self.module, self.copy(*replacements), str(self.path), TEXT).stage().commit()

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
    yield Live(module, path, open_overlay())
    sys.modules.pop(NAME, None)


def test_a_function_keeps_its_identity_and_gets_new_code(live: Live) -> None:
    bound_before = live.module.plain
    live.apply(("    return value", "    return value + 100"))
    assert bound_before is live.module.plain
    assert bound_before(1) == 101


def test_defaults_annotations_and_documentation_follow(live: Live) -> None:
    module = live.module
    held = module.REGISTRY
    # A default that is written as before keeps its object; a new one is made of what there is now.
    module.REGISTRY = ["one", "two"]
    live.apply(
        (
            'def plain(value, extra=REGISTRY, *, key="k") -> int:\n    """Stock."""\n    return value',
            'def plain(value: str, more=len(REGISTRY), extra=REGISTRY, *, key="k", flag=functools.reduce) '
            "-> list[int]:\n"
            '    """Patched."""\n    return value, more, extra, key, flag',
        )
    )
    value, more, extra, key, flag = module.plain("v")
    assert (value, more, key, flag) == ("v", 2, "k", functools.reduce)
    assert extra is held
    assert module.plain.__annotations__ == {"value": str, "return": list[int]}
    assert module.plain.__doc__ == "Patched."
    assert "more=2" in str(inspect.signature(module.plain))


def test_methods_of_every_kind_are_swapped(live: Live) -> None:
    runner = live.module.Runner()
    live.apply(
        ('"stock " + super()', '"patched " + super()'),
        ('def plainly(self):\n        return "stock"', 'def plainly(self):\n        return "patched"'),
        ('def static():\n        return "stock"', 'def static():\n        return "patched"'),
        ('"stock " + cls', '"patched " + cls'),
        ("        return 1", "        return 100"),
        ("self.state = value", "self.state = -value"),
        ("mangled stock", "mangled patched"),
    )
    runner.size = 3
    assert (runner.greet(), runner.plainly(), runner.static()) == ("patched parent", "patched", "patched")
    assert (runner.made(), runner.size, runner.state) == ("patched Runner", 100, -3)
    assert runner.call_private() == "mangled patched"


def test_a_wrapped_function_is_swapped_inside_its_wrapper(live: Live) -> None:
    live.apply(('yield "stock"', 'yield "patched"'))
    with live.module.managed() as value:
        assert value == "patched"


def test_new_names_are_added(live: Live) -> None:
    live.apply(
        ("import functools\n", "import functools\nimport colorsys\nfrom os import path as elsewhere\n"),
        ("    return value", "    return fresh(value), Fresh().answer, elsewhere.sep"),
        (
            "class Parent:",
            "def fresh(x, y=[colorsys]):\n    return x\n\n\nclass Fresh:\n    answer = 42\n\n\nclass Parent:",
        ),
        (
            "    def __private(self):",
            "    def __secret(self):\n        return 'secret'\n\n"
            "    @property\n    def added(self) -> str:\n"
            "        return super().greet() + self.__private() + self.__secret()\n\n"
            "    @classmethod\n    def another(cls, x=REGISTRY):\n        return cls, x\n\n    def __private(self):",
        ),
    )
    module = live.module
    assert module.plain(5) == (5, 42, "/")
    assert module.fresh.__globals__ is vars(module)
    assert module.Fresh.__module__ == NAME
    assert module.Runner().added == "parent" + "mangled stock" + "secret"
    assert module.Runner.another() == (module.Runner, module.REGISTRY)
    assert module.Runner.another.__qualname__ == "Runner.another"


def test_source_and_tracebacks_come_from_the_copy(live: Live) -> None:
    module = live.module
    copy = live.copy(("import functools", "import functools\n\n# a longer text"), ('"stock")', '"patched")'))
    plan_module(module, copy, str(live.path), TEXT).stage().commit()
    for _ in range(2):
        assert inspect.getsource(module) == copy.text.decode()
        assert inspect.getsource(module.fail) == 'def fail():\n    raise ValueError("patched")\n'
        assert inspect.getsource(module.plain) in copy.text.decode()
        assert inspect.getsource(module.Runner) in copy.text.decode()
        assert inspect.getsource(module.Runner.greet) in copy.text.decode()
        linecache.clearcache()
    assert module.__file__ == str(copy.path) == module.fail.__code__.co_filename == module.__spec__.origin
    assert module.__loader__ is module.__spec__.loader
    assert module.__spec__.loader.get_filename() == module.__file__
    with pytest.raises(ValueError, match="patched") as caught:
        module.fail()
    assert 'raise ValueError("patched")' in "".join(traceback.format_exception(caught.value))
    # An unchanged function keeps its code, which lies in the installed file, where its text is the same.
    assert module.plain.__code__.co_filename == str(live.path)


def test_taking_it_back_leaves_the_module_as_it_was(live: Live) -> None:
    before = dict(vars(live.module))
    code = live.module.plain.__code__
    undo = live.apply(
        ("import functools\n", "import functools\nimport colorsys\n"), ("    return value", "    return -value")
    )
    assert live.module.plain(1) == -1
    undo()
    assert vars(live.module) == before
    assert live.module.plain.__code__ is code


def test_an_error_while_committing_leaves_nothing_changed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    staged = plan_module(
        live.module, live.copy(("    return value", "    return -value")), str(live.path), TEXT
    ).stage()
    broken = dataclasses.replace(staged.setters[-1], target=object())
    with pytest.raises(AttributeError):
        dataclasses.replace(staged, setters=(*staged.setters, broken)).commit()
    assert live.module.plain(1) == 1
    assert live.module.__file__ == str(live.path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('def plainly(self):\n        return "stock"', "def plainly(self):\n        return super().greet()"),
        ("REGISTRY = []", "REGISTRY = [1]"),
        ("import functools", "import functools\nimport there_is_no_such_module"),
    ],
    ids=["a variable more is closed over", "state", "an import that fails"],
)
def test_a_change_that_cannot_be_made_in_place_is_refused(live: Live, old: str, new: str) -> None:
    live.refused((old, new))


PLAIN = ("    return value", "    return -value")
OBSTACLES: dict[str, tuple[Callable[[ModuleType], object], tuple[str, str]]] = {
    "another function": (lambda module: setattr(module, "plain", lambda value: value), PLAIN),
    "a cached function": (lambda module: setattr(module, "plain", functools.lru_cache(vars(module)["plain"])), PLAIN),
    "other defaults": (lambda module: setattr(vars(module)["plain"], "__defaults__", ("bound", "too")), PLAIN),
    "another class": (
        lambda module: setattr(module, "Runner", type("Other", (), {"greet": vars(module)["Runner"].greet})),
        ('"stock " + super()', '"x" + super()'),
    ),
    "a name that is taken": (
        lambda module: setattr(module, "fresh", 1),
        ("class Parent:", "def fresh(): ...\n\n\nclass Parent:"),
    ),
    "an import under way": (lambda module: setattr(module.__spec__, "_initializing", True), PLAIN),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_module_that_is_not_what_its_text_says_is_refused(live: Live, obstacle: str) -> None:
    make, edit = OBSTACLES[obstacle]
    live.apply(edit)()
    make(live.module)
    live.refused(edit)


def test_a_refusal_names_the_importers(live: Live) -> None:
    holder = ModuleType("a_holder")
    holder.plain = live.module.plain  # type: ignore[attr-defined]
    sys.modules["a_holder"] = holder
    try:
        assert importers_of(live.module) == ("a_holder",)
        with pytest.raises(ReapplyRefused, match="a_holder"):
            live.apply(("REGISTRY = []", "REGISTRY = [1]"))
    finally:
        del sys.modules["a_holder"]


def test_a_living_closure_is_refused(live: Live) -> None:
    inner = live.module.make()
    live.refused(('return "stock"\n    return inner', 'return "patched"\n    return inner'))
    del inner
    live.apply(('return "stock"\n    return inner', 'return "patched"\n    return inner'))
    assert live.module.make()() == "patched"


def test_a_suspended_generator_is_refused(live: Live) -> None:
    running = live.module.count()
    next(running)
    live.refused(("yield 2", "yield 3"))
    del running
    live.apply(("yield 2", "yield 3"))
    assert list(live.module.count()) == [1, 3]


def test_a_suspended_coroutine_is_refused(live: Live) -> None:
    waiting = live.module.later()
    edit = ('async def later():\n    return "stock"', 'async def later():\n    return "patched"')
    live.refused(edit)
    assert asyncio.run(waiting) == "stock"
    live.apply(edit)
    assert asyncio.run(live.module.later()) == "patched"


def test_a_running_function_is_refused(live: Live) -> None:
    seen: list[str] = []
    text = TEXT.replace("    return value", "    return value() if callable(value) else value")
    live.path.write_text(text)
    module = importlib.reload(live.module)
    copy = live.overlay.place(patched_file(f"{NAME}.py", NAME, text.replace("Stock.", "Patched.")))

    def probe() -> None:
        with pytest.raises(ReapplyRefused):
            plan_module(module, copy, str(live.path), text)
        seen.append("asked")

    module.plain(probe)
    assert seen == ["asked"]
    plan_module(module, copy, str(live.path), text)


def test_an_object_that_the_old_text_set_up_is_refused(live: Live) -> None:
    class Derived(live.module.Runner):  # type: ignore[name-defined,misc]
        pass

    runner = Derived()
    edit = ("self.state = 1", "self.state = self.more = 1")
    live.refused(edit)
    del runner
    live.apply(edit)
    assert Derived().more == 1


def test_an_object_of_a_compiled_class_is_refused(live: Live) -> None:
    text = TEXT.replace(
        "class Runner(Parent):",
        "def support_torch_compile(cls):\n    return cls\n\n\n@support_torch_compile\nclass Runner(Parent):",
    )
    live.path.write_text(text)
    module = importlib.reload(live.module)
    copy = live.overlay.place(
        patched_file(f"{NAME}.py", NAME, text.replace('"stock " + super()', '"patched " + super()'))
    )
    runner = module.Runner()
    with pytest.raises(ReapplyRefused):
        plan_module(module, copy, str(live.path), text)
    del runner
    gc.collect()
    plan_module(module, copy, str(live.path), text).stage().commit()
    assert module.Runner().greet() == "patched parent"


def test_asking_who_imported_it_runs_no_code_of_others(live: Live) -> None:
    class Lazy:
        @property
        def __class__(self) -> type:
            raise AssertionError("asked")

    holder = ModuleType("a_holder")
    holder.lazy = Lazy()  # type: ignore[attr-defined]
    sys.modules["a_holder"] = holder
    try:
        assert importers_of(live.module) == ()
    finally:
        del sys.modules["a_holder"]


def test_postponed_annotations_stay_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    text = textwrap.dedent("""
        from __future__ import annotations

        def f(x: Missing) -> None:
            return 1
        """)
    path = tmp_path / "postponed_module.py"
    path.write_text(text)
    module = importlib.import_module("postponed_module")
    try:
        new = text.replace("x: Missing", "x: Missing, y: Gone[int]=2").replace("return 1", "return g()")
        new += "\ndef g(x: Absent = 1) -> Nothing:\n    return 3\n"
        copy = open_overlay().place(patched_file("postponed_module.py", "postponed_module", new))
        plan_module(module, copy, str(path), text).stage().commit()
        assert module.f(0) == 3
        assert module.f.__annotations__ == {"x": "Missing", "y": "Gone[int]", "return": "None"}
        assert module.g.__annotations__ == {"x": "Absent", "return": "Nothing"}
    finally:
        del sys.modules["postponed_module"]
