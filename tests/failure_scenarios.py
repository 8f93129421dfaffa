# SPDX-License-Identifier: Apache-2.0
"""Cause each failure of a patch in docs/failures.md. The keys of `PATCHES` are words of the page's rows.

A scenario changes a made-up vLLM, and has the code of a process. The process calls ``attempt()``, which returns two
dicts of states: of the affected features, and of the others. ``live`` is patched in.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .patching.madeup import EDITS, GATES, OTHER_EDITS, Project

MADE_UP, OTHER, THIRD = GATES
ACME, FOLDERS = "VLLM_HWPLUGIN_PATCH_ACME_FIX", "VLLM_HWPLUGIN_PATCHES"
LIMIT = [("LIMIT = 3", "LIMIT = 4")]


INSTALL = """
def states(entry, affected):
    others = {name: feature["state"] for name, feature in entry.features.items()}
    return {affected: others.pop(affected, "none")}, others

def attempt():
    return states(install(), AFFECTED)
"""


@dataclass(frozen=True)
class Scenario:
    """A failure.

    Attributes:
        attempt: code that defines ``attempt()``. For the default, `doctor` foretells what a process does.
        change: changes the project before the process starts.
        gate: the switch of the affected feature.
        affected: this feature, or a catalogue that is left out.
        variables: environment variables in every column.
    """

    attempt: str = INSTALL
    change: Callable[[Project], None] = lambda project: None
    gate: str = MADE_UP
    affected: str = "made-up"
    variables: Mapping[str, str] = field(default_factory=dict)


def made_up(project: Project) -> None:
    project.feature("made-up", EDITS)
    project.feature("other", OTHER_EDITS, gate=OTHER)


def made_up_with(*changes: Callable[[Project], None]) -> Callable[[Project], None]:
    def change(project: Project) -> None:
        made_up(project)
        for further in changes:
            further(project)

    return change


def _spoil(project: Project) -> None:
    """The patched text is no Python."""
    diff = project.patches / "made-up" / "edit.diff"
    diff.write_text(diff.read_text().replace("+    return mul(", "+    return mul(("))


def _relies(project: Project) -> None:
    relied_on = "vllm/v1/pack/inner.py"
    project.feature("made-up", EDITS, more=f'relies = ["{relied_on}"]')
    (project.patches / "texts.json").write_text(f'{{"{relied_on}": {{"0.20.0": "of another"}}}}')


def _overrides(project: Project) -> None:
    table = '[[overrides]]\npath = "vllm/v1/alpha.py"\nclass = "Runner"\n'
    project.feature("made-up", EDITS, more=table + 'methods = {step = "self, other"}')


def _rival(project: Project) -> None:
    project.feature("rival", {"vllm/v1/alpha.py": [("value * 2", "value + value")]}, gate=THIRD)


def _uninstall(project: Project) -> None:
    project.write("acme_lib/core.py", "VALUE = 1\n")
    edits = {"acme_lib/core.py": [("VALUE = 1", "VALUE = 2")]}
    more = 'distribution = "acme-lib"'
    project.feature("fix", edits, gate=None, catalogue=project.catalogue("acme"), more=more)


def _own_catalogue(project: Project) -> None:
    edits = {"vllm/v1/pack/inner.py": [("'inner'", "'fixed'")]}
    project.feature("fix", edits, gate=None, catalogue=project.catalogue("acme"))


def _open_to_all(project: Project) -> None:
    (project.folder / "acme").chmod(0o777)


def _needs(project: Project) -> None:
    project.feature("needs", {"vllm/v1/pack/inner.py": [("'inner'", "'x'")]}, gate=THIRD, requires=["made-up"])


def _apply(project: Project) -> None:
    for path, replacements in EDITS.items():
        text = project.read(path)
        for old, new in replacements:
            text = text.replace(old, new)
        project.write(path, text)


def _second_tree(project: Project) -> None:
    shutil.copytree(project.site, project.folder / "second")


def _state(*more: str) -> Callable[[Project], None]:
    """Make a feature that cannot be patched in place: it changes a statement of the module."""

    def change(project: Project) -> None:
        edits = {"vllm/v1/alpha.py": LIMIT, **{path: EDITS[path] for path in more}}
        project.feature("dflash-made-up", edits)
        project.feature("other", OTHER_EDITS, gate=OTHER)

    return change


IMPORTED = """
def attempt():
    import vllm.v1.alpha
    return states(install(), "dflash-made-up")
"""

# A platform class makes this call when vLLM has made the configuration, here after an import past the finder.
DFLASH = """
from importlib.machinery import PathFinder
from types import SimpleNamespace
from vllm_hwplugin import dflash

def config(**draft):
    target = SimpleNamespace(num_hidden_layers=4, hidden_size=64)
    model = SimpleNamespace(model="draft", hf_config=SimpleNamespace(**draft)) if draft else None
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            use_dflash=lambda: True, num_speculative_tokens=7, attention_backend=None, draft_model_config=model,
            target_model_config=SimpleNamespace(model="target", hf_text_config=target),
        ),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[], max_cudagraph_capture_size=None, compile_sizes=None
        ),
        use_v2_model_runner=True,
    )
"""
DFLASH_MODULE = (
    DFLASH
    + """
def attempt():
    entry = install()
    sys.meta_path.insert(0, PathFinder)
    import vllm.v1.alpha
    sys.meta_path.remove(PathFinder)
    dflash.check_and_update_config(config())
    return states(entry, "dflash-made-up")
"""
)
DFLASH_CONFIG = (
    DFLASH
    + """
def attempt():
    entry = install()
    dflash.check_and_update_config(config(hidden_size=32, block_size=8, dflash_config={"target_layer_ids": [0]}))
    return states(entry, "made-up")
"""
)

DFLASH_FAULT = (
    DFLASH
    + """
def attempt():
    entry = install()
    made = config(hidden_size=64, block_size=8, dflash_config={"target_layer_ids": [0]})
    # A vLLM whose configuration has another shape.
    made.speculative_config.target_model_config = None
    dflash.check_and_update_config(made)
    return states(entry, "made-up")
"""
)

# Another package puts a finder first, as test frameworks and type checkers do. A worker calls `report` last.
OVERTAKEN = """
from importlib.machinery import PathFinder
from vllm_hwplugin.spec_decode.engine_report import Findings, report

def attempt():
    entry = install()
    sys.meta_path.insert(0, PathFinder)
    import vllm.v1.alpha
    sys.meta_path.remove(PathFinder)
    import vllm.v1.beta
    report(None, lambda part, entry: Findings("this worker", {}))
    return states(entry, "made-up")
"""
# A spawned process reads the catalogue again.
OTHER_PATCHES = """
import multiprocessing

def attempt():
    install()
    # Nothing was imported by the patches yet.
    _runtime._state.withdraw()
    _runtime._state = None
    diff = Path(CACHE).parent / "acme" / "fix" / "edit.diff"
    text = diff.read_text()
    diff.write_text(text.replace("'fixed'", "'fixed otherwise'"))
    multiprocessing.current_process().name = "EngineCore_0"
    try:
        return states(install(), "acme/fix")
    finally:
        # The other columns have the same catalogue.
        diff.write_text(text)
"""

ACME_FIX = {"gate": ACME, "affected": "acme/fix", "variables": {FOLDERS: "acme"}}
PATCHES: dict[str, list[Scenario]] = {
    "a diff does not fit": [Scenario(change=made_up_with(change)) for change in (Project.drift, _spoil)],
    "reads but does not change": [Scenario(change=made_up_with(_relies))],
    "overrides methods of a class": [Scenario(change=made_up_with(_overrides))],
    "two features change the same lines": [Scenario(change=made_up_with(_rival), gate=THIRD, affected="rival")],
    "a file that the feature changes cannot be read": [Scenario(change=made_up_with(Project.tear))],
    "imported before the plugin": [
        Scenario(INSTALL + IMPORTED, _state()),
        Scenario(INSTALL + IMPORTED.replace("import vllm.v1.alpha", 'sys.modules["vllm.v1.alpha"] = None'), _state()),
    ],
    "the distribution that": [Scenario(change=made_up_with(_uninstall), **ACME_FIX)],
    "a catalogue of your own": [
        Scenario(
            INSTALL + f'import os; attempt = lambda: states(install(), os.environ["{FOLDERS}"])',
            made_up_with(_uninstall, _open_to_all),
            gate=ACME,
            variables={FOLDERS: "acme"},
        )
    ],
    "requires cannot be patched in": [
        Scenario(
            INSTALL
            + """
def attempt():
    affected, others = states(install(), "needs")
    # The requirement has a row of its own.
    del others["made-up"]
    return affected, others
""",
            made_up_with(_needs, Project.drift),
            THIRD,
        )
    ],
    "requires is switched off": [
        Scenario(change=made_up_with(_needs), gate=THIRD, affected="needs", variables={MADE_UP: "off"})
    ],
    "has the change already": [Scenario(change=made_up_with(_apply))],
    "does not know vLLM's version": [Scenario(change=made_up_with(Project.age))],
    "no plan can be made": [
        Scenario(change=made_up_with(Project.forget_version)),
        Scenario(INSTALL + "_runtime.make_plan = None", made_up),
        Scenario(INSTALL + "import tempfile; tempfile.tempdir = '/proc/nowhere'", made_up_with(Project.block_cache)),
    ],
    "a variable for the whole plugin": [Scenario(change=made_up, variables={"VLLM_HWPLUGIN_SLP": "perhaps"})],
    "(this part is off)": [
        Scenario(change=made_up, variables={f"VLLM_HWPLUGIN_{part}": "perhaps"})
        for part in ("OPS", "ATTENTION", "PLAIN_DECODE", "MORE_GRAPHS")
    ],
    "the switch of a feature": [
        Scenario(change=made_up, variables={MADE_UP: "perhaps"}),
        Scenario(
            change=made_up_with(_own_catalogue), affected="acme/fix", variables={FOLDERS: "acme", ACME: "perhaps"}
        ),
    ],
    "must run unpatched": [
        Scenario(
            """
class Overtaken(_runtime.CopyFinder):
    def put_first(self):
        # Another thread imports modules before and after the finder is first.
        import vllm.v1.alpha
        super().put_first()
        import vllm.v1.pack

_runtime.CopyFinder = Overtaken

def attempt():
    install()
    return {}, {}
""",
            _state("vllm/v1/pack/__init__.py"),
        ),
        Scenario(INSTALL + OVERTAKEN.replace("install()", "install(); import vllm.v1.pack"), made_up),
    ],
    "another import hook": [Scenario(INSTALL + OVERTAKEN, made_up)],
    "other patches than the first": [Scenario(INSTALL + OTHER_PATCHES, made_up_with(_own_catalogue), **ACME_FIX)],
    "another vLLM has taken": [
        Scenario(
            """
def attempt():
    install()
    sys.path.insert(0, SECOND)
    import vllm.v1.alpha
    return {}, {}
""",
            made_up_with(_second_tree),
        )
    ],
    "the patched copy": [
        Scenario(
            """
def attempt():
    import shutil
    overlay = Path(CACHE, "overlay")
    install()
    shutil.rmtree(overlay)
    overlay.write_text("in the way")
    try:
        import vllm.v1.alpha
    finally:
        # The other columns have the same cache.
        overlay.unlink()
    return {}, {}
""",
            made_up,
        )
    ],
    "was imported past the plugin": [Scenario(INSTALL + DFLASH_MODULE, _state())],
    "a part of the feature": [
        Scenario(
            INSTALL + DFLASH_MODULE.replace("entry = install()", "entry = install(); import vllm.v1.pack"),
            _state("vllm/v1/pack/__init__.py"),
        )
    ],
    "no version of vLLM can combine": [Scenario(INSTALL + DFLASH_CONFIG, made_up)],
    "some version of vLLM serves": [
        Scenario(
            INSTALL + DFLASH_CONFIG.replace("hidden_size=32, block_size=8", "hidden_size=64, block_size=7"),
            made_up,
            THIRD,
        )
    ],
    "fails at a configuration": [Scenario(INSTALL + DFLASH_FAULT, made_up, THIRD)],
    "a feature is patched in, and the engine": [
        Scenario(
            INSTALL
            + """
def attempt():
    from vllm_hwplugin.base.fallback import report_unused
    entry = install()
    # A feature makes this call if the engine cannot use it. The made-up feature has the same switch.
    report_unused("draft-full-graph", "the drafter runs as in stock vLLM", "a reason")
    return states(entry, "made-up")
""",
            made_up,
        )
    ],
}
