"""A made-up vLLM and made-up features, small enough to read; run in fresh processes by the tests beside this file."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm_hwplugin
from tests.cpu_seconds import patience

from . import forks

REPOSITORY = Path(vllm_hwplugin.__file__).parent.parent
GATES = ("VLLM_HWPLUGIN_DRAFT_FULL_GRAPH", "VLLM_HWPLUGIN_DFLASH_CONTEXT_NORM", "VLLM_HWPLUGIN_DFLASH_FULL_GRAPH")

FILES = {
    "vllm/__init__.py": "LOADED = True\n",
    "vllm/_version.py": "__version__ = version = '0.32.0'\n",
    "vllm/envs.py": """
        import os
        environment_variables = {"VLLM_PORT": lambda: os.environ.get("VLLM_PORT")}

        def compile_factors():
            return {name: getter() for name, getter in environment_variables.items()}
        """,
    "vllm/v1/__init__.py": "",
    "vllm/v1/alpha.py": '''
        """The module alpha."""
        import os

        LIMIT = 3


        def double(value):
            return value * 2


        def fail():
            raise ValueError("stock")


        class Runner:
            """Runs."""

            def step(self, value: int) -> int:
                return value + 1

            def untouched(self):
                return "same"
        ''',
    "vllm/v1/beta.py": """
        from vllm.v1.alpha import double


        def quadruple(value):
            return double(double(value))
        """,
    "vllm/v1/pack/__init__.py": """
        def name():
            return "stock pack"
        """,
    "vllm/v1/pack/inner.py": "VALUE = 'inner'\n",
}

# What most tests patch: a function, a raising function, a method, a new import and a package.
EDITS = {
    "vllm/v1/alpha.py": [
        ("return value * 2", "return mul(value, 3)"),
        ('raise ValueError("stock")', 'raise ValueError("patched")'),
        ("return value + 1", "return value + 10"),
        ("import os", "import os\nfrom operator import mul"),
    ],
    "vllm/v1/pack/__init__.py": [('"stock pack"', '"patched pack"')],
}

# Of another feature, which most that is wrong leaves alone.
OTHER_EDITS = {"vllm/v1/beta.py": [("double(double(value))", "double(value)")]}

# Runs outcome() in a fork for each set of variables: an environment costs no start of an interpreter.
FORKS = """
import json, os, traceback
answers = {}
for name, variables in environments.items():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ.update(variables)
        try:
            answer = json.dumps(outcome())
        except BaseException:
            answer = json.dumps({"failed": traceback.format_exc()})
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answers[name] = json.loads(stream.read())
    os.waitpid(child, 0)
print(json.dumps(answers))
"""


@dataclass
class Project:
    """A folder with an installed package, a catalogue of patches and a cache."""

    folder: Path

    @property
    def site(self) -> Path:
        return self.folder / "site"

    @property
    def patches(self) -> Path:
        return self.folder / "patches"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def write(self, path: str, text: str) -> Path:
        target = self.site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(text).lstrip("\n"))
        return target

    def read(self, path: str) -> str:
        return (self.site / path).read_text()

    def feature(
        self,
        name: str,
        edits: Mapping[str, Sequence[tuple[str, str]]],
        *,
        gate: str | None = GATES[0],
        requires: Sequence[str] = (),
        catalogue: Path | None = None,
        versions: str = ">=0.20.0,<0.34.0",
        more: str = "",
    ) -> None:
        """Write a feature whose diff is the given replacements, made by difflib against the package as it is.

        Args:
            gate: None to leave it out, as catalogues from outside may.
            catalogue: the folder of such a catalogue; the project's own by default.
            more: lines of its `patch.toml`.
        """
        folder = (self.patches if catalogue is None else catalogue) / name
        folder.mkdir(parents=True, exist_ok=True)
        diff = ""
        for path, replacements in edits.items():
            before = after = self.read(path)
            for old, new in replacements:
                assert old in after, (path, old)
                after = after.replace(old, new)
            lines = difflib.unified_diff(
                before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
            )
            diff += "".join(lines)
        (folder / "edit.diff").write_text(diff)
        (folder / "patch.toml").write_text(
            f'id = "{name}"\ntitle = "a made-up feature"\nwhat = "tests"\norigin = "tests"\n'
            + (f'gate = "{gate}"\n' if gate is not None else "")
            + f'removal = "never"\nrequires = {list(requires)}\nversions = "{versions}"\n{more}\n'
        )

    def catalogue(self, name: str, folder: Path | None = None, **values: str) -> Path:
        """An empty catalogue from outside, by default in a folder of its name."""
        folder = self.folder / name if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f'{key} = "{value}"\n' for key, value in {"name": name, **values}.items()]
        (folder / "catalogue.toml").write_text("".join(lines))
        return folder

    def distribution(self, name: str, version: str, files: Mapping[str, str], entry_points: str = "") -> None:
        """Install a made-up distribution beside vLLM, with the metadata that an installer leaves."""
        for path, text in files.items():
            self.write(path, text)
        metadata = f"{name.replace('-', '_')}-{version}.dist-info"
        self.write(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self.write(f"{metadata}/RECORD", "".join(f"{path},,\n" for path in files))
        if entry_points:
            self.write(f"{metadata}/entry_points.txt", entry_points)

    def drift(self) -> None:
        """A line that `EDITS` change is another one."""
        self.write("vllm/v1/alpha.py", self.read("vllm/v1/alpha.py").replace("value * 2", "value*2"))

    def tear(self) -> None:
        """One of the files is no text."""
        (self.site / "vllm/v1/alpha.py").write_bytes(b"# \xe9\n")

    def age(self) -> None:
        """It is of a version that nobody knows."""
        self.write("vllm/_version.py", "__version__ = version = '0.99.0'\n")

    def forget_version(self) -> None:
        (self.site / "vllm/_version.py").unlink()

    def block_cache(self) -> None:
        """The first place of the cache cannot be had."""
        self.cache.write_text("in the way")
        (self.folder / "tmp").mkdir()

    def environ(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "PYTHON"))}
        paths = os.pathsep.join([str(self.site), str(REPOSITORY)])
        return kept | {"PYTHONPATH": paths, "VLLM_HWPLUGIN_CACHE_DIR": str(self.cache)} | variables

    def command(self, *code: str, flags: Sequence[str] = ()) -> list[str]:
        """A Python that can put the features of this project in force with ``install()`` and runs ``code``."""
        prelude = (
            "import sys\nfrom pathlib import Path\nfrom vllm_hwplugin.patching import _catalogue, _runtime\n"
            f"_catalogue.default_folder = lambda: Path({str(self.patches)!r})\ninstall = _runtime.install\n"
            # The host's own is not for tests.
            f"from vllm_hwplugin.base import cachedir\ncachedir.SHARED_MEMORY = Path({str(self.folder / 'shm')!r})\n"
        )
        return [sys.executable, *flags, "-c", "\n".join([prelude, *(textwrap.dedent(part) for part in code)])]

    def start(self, *code: str, flags: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        environ, command = self.environ(**variables), self.command(*code, flags=flags)
        if not flags and not any(name.startswith("PYTHON") for name in variables):
            return forks.start(command[-1], REPOSITORY, environ, timeout=patience(120))
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=patience(120))

    def run(self, *code: str, flags: Sequence[str] = (), **variables: str) -> str:
        """Run ``code`` in a fresh process that must succeed; returns what it printed."""
        done = self.start(*code, flags=flags, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def outcomes(self, code: str, environments: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        """What ``outcome()``, which ``code`` defines, returns under each of the named sets of variables."""
        done = self.run(f"environments = {dict(environments)!r}", code, FORKS)
        answers: dict[str, Any] = json.loads(done.splitlines()[-1])
        for name, answer in answers.items():
            assert "failed" not in answer, f"{name}: {answer['failed']}"
        return answers


def make_project(folder: Path) -> Project:
    """A package ``vllm`` that is not vLLM, and no feature yet."""
    made = Project(folder)
    for path, text in FILES.items():
        made.write(path, text)
    made.patches.mkdir()
    return made
