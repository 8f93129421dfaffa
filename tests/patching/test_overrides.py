# SPDX-License-Identifier: Apache-2.0
"""A class that is not the one that overrides were written for is noticed from its text."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from vllm_hwplugin.base.versions import SUPPORTED, Versions
from vllm_hwplugin.patching import Catalogue, Feature, load_catalogue, make_plan
from vllm_hwplugin.patching._model import Overridden, Relied, blob_of
from vllm_hwplugin.patching._overrides import misfits
from vllm_hwplugin.patching.texts import CatalogueError, Source, Status
from vllm_hwplugin_workshop.verdicts import evaluate

from .madeup import GATES, Project
from .texts import GATE, PATH, Memory, feature, file_diff

TEXT = """\
import torch

class Runner(Base):
    @torch.inference_mode()
    def step(self, batch):
        made = self.prepare(batch, 1)
        return self.model.run(made)

    def prepare(self, batch, desc, *, eager=False):
        return batch

    @property
    def size(self):
        return 1

    def warm(self):
        self.prepare(0, 1)
"""
OVERRIDE = Overridden(
    Relied(PATH, {}),
    "Runner",
    {"prepare": "self, ..., desc, *, eager"},
    {"step": ("self.prepare", "self.model.run|self.model.go")},
    ("warm",),
)


def found(text: str, override: Overridden = OVERRIDE) -> str:
    return "; ".join(misfits(override, ast.parse(text)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        # What an override does not ask for.
        ("def prepare(self, batch, desc", "def prepare(self, batch, more, desc"),
        ("return self.model.run(made)", "return self.model.go(made)"),
        ("self.prepare(0, 1)", "self.prepare(0, self.prepare(0, 1))"),
        ("return 1", "return self.prepared + self.other.prepare() + self.model.runs"),
    ],
)
def test_a_class_as_declared_fits(old: str, new: str) -> None:
    assert not found(TEXT.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def prepare(self, batch, desc", "def prepare(self, batch", "takes (self, batch, *, eager), expected (self, "),
        ("desc, *, eager=False", "desc, /, *eager, **more", "takes (self, batch, desc, /, *eager, **more)"),
        ("def prepare", "def make", "prepare is defined 0 times"),
        ("    def prepare", "    @cached\n    def prepare", "is @cached, expected a plain method"),
        ("    def prepare", "    async def prepare", "is async, expected a plain method"),
        ("self.prepare(batch, 1)", "batch", "step uses self.model.run of what is overridden, expected self.prepare, "),
        ("return self.model.run(made)", "return self.prepare(self.model.run(made), 1)", "self.prepare, self.model.run"),
        ("return 1", "return self.prepare(1, 2)", "size uses self.prepare of what is overridden, expected nothing"),
        ("return 1", "return getattr(self, 'prepare')(1, 2)", "size uses self.prepare"),
        ("return 1", "model = self.model\n        return model.run()", "size uses self.model.run"),
        ("return 1", "return super(Runner, self).size", "Runner names itself"),
        ("import torch", "import torch\n\ndef other():\n    global Runner\n    Runner = 1", "gives the name Runner to"),
        ("def step", "def steps", "Runner has no step"),
        ("class Runner", "class Runners", "has 0 classes Runner"),
        ("import torch", "class Runner: pass", "has 2 classes Runner"),
    ],
)
def test_another_class_is_told_apart(old: str, new: str, said: str) -> None:
    assert TEXT.count(old) >= 1
    assert said in found(TEXT.replace(old, new, 1))


def overriding(known: str, override: Overridden = OVERRIDE, name: str = "one", gate: str = GATE) -> Feature:
    """A feature of which this release has read the text `known`."""
    text = Relied(PATH, {"0.26.0": blob_of(known)})
    made = feature(file_diff(TEXT, TEXT.replace("class", "@decorated\nclass")), name=name, gate=gate)
    return made._replace(overrides=(override._replace(text=text),))


OTHER = TEXT.replace("return 1", "return self.prepare(1, 2)")


@pytest.mark.parametrize(
    ("text", "known", "version", "state"),
    [
        (TEXT, TEXT, "0.32.0", "live"),
        (TEXT, "", "0.32.0", "live"),
        # Its hunk fits each of these.
        (OTHER, TEXT, "0.32.0", "refused"),
        # A start does not read a text that the tests of this release have read.
        (OTHER, OTHER, "0.32.0", "live"),
        (OTHER, OTHER, "0.25.1", "refused"),
        (OTHER, OTHER, "0.99.0", "refused"),
    ],
)
def test_a_start_reads_a_text_that_is_not_known(text: str, known: str, version: str, state: str) -> None:
    for choice in ("auto", "on"):
        plan = make_plan(
            Catalogue((overriding(known),)), Memory({PATH: text}, version), {GATE: choice}, try_unlisted=True
        )
        assert plan.features["one"].state == state
        assert bool(plan.errors) == (choice == "on" and state == "refused")
        assert plan.features["one"].overridden == (
            {"vllm.v1.alpha.Runner": ("prepare", "model.run", "model.go")} if state == "live" else {}
        )


def test_the_drift_check_reads_each_text() -> None:
    verdict = evaluate(overriding(OTHER), Memory({PATH: OTHER}))
    assert verdict.status is Status.OTHER_CLASS
    assert verdict.reason.startswith("an override does not fit: in Runner, size uses self.prepare")
    older = OVERRIDE._replace(versions=Versions("<0.32"))
    assert evaluate(overriding(OTHER, older), Memory({PATH: OTHER})).status is Status.APPLIES


MORE = """
[[overrides]]
path = "vllm/v1/alpha.py"
class = "Runner"
also = ["untouched"]

[overrides.methods]
step = "self, value"
"""


def test_overrides_are_read_from_the_catalogue(project: Project) -> None:
    edit = {"vllm/v1/alpha.py": [("class Runner", "@decorated\nclass Runner")]}
    project.feature("one", edit, more=MORE)
    (item,) = load_catalogue(project.patches).features
    assert item.overrides == (Overridden(Relied(PATH, {}), "Runner", {"step": "self, value"}, {}, ("untouched",)),)
    assert item.texts == (Relied(PATH, {}),)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"self, value"', "1", "step is 1, expected a text"),
        ('[overrides.methods]\nstep = "self, value"', "", "expected [overrides.methods], [overrides.calls] or both"),
        ("also", "but", "[[overrides]]: unknown key 'but'"),
    ],
)
def test_overrides_that_are_not_well_formed_are_refused(project: Project, old: str, new: str, said: str) -> None:
    assert old in MORE
    project.feature("one", {"vllm/v1/alpha.py": [("LIMIT = 3", "LIMIT = 4")]}, more=MORE.replace(old, new))
    with pytest.raises(CatalogueError) as error:
        load_catalogue(project.patches)
    assert said in str(error.value)


def test_a_class_that_was_imported_too_early_costs_only_the_override(project: Project) -> None:
    """A function that is there takes a new body, and a class that is there no decorator."""
    project.feature("bodies", {"vllm/v1/alpha.py": [("return value * 2", "return value * 5")]}, gate=GATES[1])
    project.feature("overrides", {"vllm/v1/alpha.py": [("class Runner", "@type\nclass Runner")]}, more=MORE)
    code = """
        import vllm.v1.alpha as alpha
        features = install().features
        print([item["state"] for item in features.values()], alpha.double(1), features["overrides"]["reason"])
        """
    states, _, reason = project.run(code).partition("] ")
    assert states == "['live', 'refused'"
    assert reason.startswith("5 vllm.v1.alpha was imported")


RUNNER = "vllm/v1/worker/gpu/model_runner.py"


@pytest.mark.parametrize(
    ("old", "new", "refused"),
    [
        (
            "    def get_model(",
            "    def peek(self):\n        return self.sample(None, None, None)\n\n    def get_model(",
            1,
        ),
        ("    def sample(\n        self,\n", "    def sample(\n        self,\n        logits,\n", 1),
        # Lines that move between the calls are no trouble.
        ("        assert hidden_states is not None\n", "        assert hidden_states is not None\n        more()\n", 0),
    ],
)
def test_a_release_that_calls_what_is_overridden_in_another_way_is_told(
    vllm_tree: Callable[[str], Source], old: str, new: str, refused: bool
) -> None:
    """Each hunk fits all of them, and what a graph would answer is not what vLLM asks for."""
    tree, feature = vllm_tree(SUPPORTED[-1]), load_catalogue().feature("v2-tail-graph")
    assert feature is not None
    texts = {path: text for path in feature.paths if (text := tree.read(path)) is not None}
    assert evaluate(feature, Memory(texts, tree.version)).status is Status.APPLIES
    assert old in texts[RUNNER]
    texts[RUNNER] = texts[RUNNER].replace(old, new, 1)
    verdict = evaluate(feature, Memory(texts, tree.version))
    assert verdict.status is (Status.OTHER_CLASS if refused else Status.APPLIES), verdict
