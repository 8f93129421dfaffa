"""Which differences a live module can take, decided on text alone."""

from __future__ import annotations

import textwrap

import pytest

from vllm_hwplugin.patching._compare import NotSwappable, compare

BASE = """\
from __future__ import annotations
import os
from typing import TYPE_CHECKING
import torch
if TYPE_CHECKING:
    from a import B

LIMIT = 3
TABLE = {"f": f0}


def free(x):
    return x


@triton.jit
def kernel(x):
    return 1


@functools.cache
def cached():
    return 2


def registered(x):
    return 3


register_op("name", registered)


class Base:
    pass


@dataclass
class Data:
    a: int = 1

    def total(self):
        return self.a


@support_torch_compile
class Model:
    def forward(self):
        return 4

    def sample(self):
        return 9


@unknown
class Unknown:
    def m(self):
        return 20


class Runner(Base):
    __slots__ = ("x",)

    def __init__(self):
        self.x = 5

    @torch.inference_mode()
    def run(self):
        return 6

    @property
    def size(self):
        return 7

    @size.setter
    def size(self, value):
        self.x = value

    class Inner:
        def deep(self):
            return 8


runner = Runner()
"""


def changed(*replacements: tuple[str, str]) -> str:
    text = BASE
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("return x\n", "return x + 1\n", ["free"]),
        ("def free(x):", "def free(x, y=LIMIT):", ["free"]),
        ("return 6", "return -6", ["Runner.run"]),
        ("return 7", "return -7", ["Runner.size"]),
        ("self.x = value", "self.x = value + 1", ["Runner.size"]),
        ("return 8", "return -8", ["Runner.Inner.deep"]),
        ("return self.a", "return -self.a", ["Data.total"]),
        ("return 9", "return -9", ["Model.sample"]),
        ("# nothing", "", []),
    ],
)
def test_functions_and_methods_can_change(old: str, new: str, names: list[str]) -> None:
    text = changed((old, new)) if old in BASE else BASE + "# only a comment\n"
    change = compare(BASE, text)
    assert [function.name for function in change.functions] == names
    assert change.additions == change.imports == ()
    assert change.postponed_annotations


def test_a_method_of_a_compiled_class_is_marked() -> None:
    assert [item.compiled for item in compare(BASE, changed(("return 9", "return -9"))).functions] == [True]
    assert [item.compiled for item in compare(BASE, changed(("return 6", "return -6"))).functions] == [False]


def test_a_moved_function_is_no_change() -> None:
    assert compare(BASE, BASE.replace("LIMIT = 3\n", "LIMIT = 3\n\n\n")).functions == ()


def test_additions_and_imports_are_found() -> None:
    change = compare(
        BASE,
        changed(
            ("import os\n", "import os\nimport sys\nfrom os import path as p, sep\n"),
            ("def free(x):", "def new(): ...\n\n\nclass New: ...\n\n\ndef free(x):"),
            ("    class Inner:", "    def extra(self): ...\n\n    class Inner:"),
            ("from a import B", "from a import B, C"),
        ),
    )
    assert [(item.scope, item.node.name) for item in change.additions] == [
        ((), "new"),
        ((), "New"),
        (("Runner",), "extra"),
    ]
    assert [alias.asname or alias.name for node in change.imports for alias in node.names] == ["sys", "p", "sep"]


def test_every_class_gets_its_new_line() -> None:
    change = compare(BASE, BASE.replace("LIMIT = 3\n", "LIMIT = 3\n\n\n"))
    assert change.class_lines["Data",] == BASE.splitlines().index("@dataclass") + 3
    assert ("Runner", "Inner") in change.class_lines


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("LIMIT = 3", "LIMIT = 4", "changes state at module level: LIMIT = 4"),
        ("LIMIT = 3", "LIMIT = 3\nMORE = 1", "changes state at module level: MORE = 1"),
        ("LIMIT = 3\n", "", "changes state at module level"),
        ('register_op("name", registered)', "", "changes state at module level"),
        ("import torch\n", "import numpy as torch\n", "binds torch to something else"),
        ("from __future__ import annotations\n", "", "__future__"),
        ("class Runner(Base):", "class Runner(Base, Mixin):", "other bases"),
        ("class Runner(Base):", "class Runner(Base, metaclass=M):", "other keywords"),
        ("@dataclass\n", "@dataclass(slots=True)\n", "other decorator list"),
        ('("x",)', '("x", "y")', "the body of class Runner"),
        ("    a: int = 1", "    a: int = 1\n    b: int = 2", "the body of class Data"),
        ("return 4", "return -4", "Model.forward is held by @support_torch_compile"),
        (
            "    def sample(self):\n        return 9",
            "    @property\n    def sample(self):\n        return 9",
            "decorators",
        ),
        ("return 20", "return -20", "@unknown"),
        ("return 1", "return -1", "@triton.jit"),
        ("return 2\n", "return -2\n", "@functools.cache"),
        ("return 3", "return -3", "registered was used while the module was imported"),
        ("self.x = 5", "self.x = -5", r"Runner.__init__ was used while the module was imported.*Runner\(\)"),
        ("    @torch.inference_mode()\n", "", "other decorators"),
        ("def free(x):\n    return x\n", "", "free .* is removed"),
        ("def free(x):\n    return x\n", "class free: ...\n", "a class in one text"),
        ("def free(x):", "async def free(x):", "coroutine"),
        ("    class Inner:", "    def __eq__(self, o): ...\n\n    class Inner:", "new special method"),
        ("    class Inner:", "    class More: ...\n\n    class Inner:", "new class inside a class"),
        ("    class Inner:", "    @abstractmethod\n    def m(self): ...\n\n    class Inner:", "new abstract method"),
    ],
)
def test_what_ran_at_import_time_must_be_the_same(old: str, new: str, reason: str) -> None:
    with pytest.raises(NotSwappable, match=reason):
        compare(BASE, changed((old, new)))


@pytest.mark.parametrize(
    "use",
    ["TABLE = {'f': f()}", "@f\ndef g(): ...", "def g(x=f()): ...", "class C(f()): ...", "class C:\n    x = f()"],
)
def test_a_result_of_a_changed_function_is_state(use: str) -> None:
    text = f"def f(*a):\n    return int\n\n\n{use}\n"
    with pytest.raises(NotSwappable, match="f was used while the module was imported"):
        compare(text, text.replace("return int", "return str"))


@pytest.mark.parametrize("use", ["TABLE = {'f': f}", "def g():\n    return f()", "h = lambda: f()"])
def test_holding_a_changed_function_is_no_state(use: str) -> None:
    text = f"def f(*a):\n    return int\n\n\n{use}\n"
    assert len(compare(text, text.replace("return int", "return str")).functions) == 1


def test_a_hook_of_class_creation_is_refused() -> None:
    text = textwrap.dedent("""
        class A:
            def __init_subclass__(cls):
                cls.x = 1
        """)
    with pytest.raises(NotSwappable, match="runs while classes are made"):
        compare(text, text.replace("cls.x = 1", "cls.x = 2"))
