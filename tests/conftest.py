"""What all tests share: which tests a host can run, and the text of every vLLM version.

A test that this host cannot run is skipped with the reason. In CI (`CI=true`) it fails instead where CI has to be able
to run it: there a missing network or engine is a fault of the set-up, and a skip would hide it. Only a GPU may be
missing in CI.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import platformdirs
import pytest

from tests import releases
from tests.cpu_seconds import Budget, Clock
from vllm_hwplugin.base import log
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.patching import find_installed, load_catalogue
from vllm_hwplugin_lab.bench import Host, detect_host
from vllm_hwplugin_workshop.sources import Index, IndexSource, IndexUnreachable, PipConfig, SourceError


def cannot_run(reason: str) -> NoReturn:
    """Skip the running test, or fail it in CI."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"{reason}; CI must be able to run this test", pytrace=False)
    pytest.skip(reason)


# A host that runs tests/gpu alone need not have it.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import Phase, settings

    # The same examples in every run, and no time limit for one: the host is at times busy with other work. A walk that
    # fails is said as it is: shrinking takes minutes, `--hypothesis-profile shrink` does it.
    settings.register_profile("shrink", derandomize=True, database=None, deadline=None, max_examples=50)
    unshrunk = set(Phase) - {Phase.shrink, Phase.explain}
    settings.register_profile("fixed", settings.get_profile("shrink"), phases=unshrunk)
    settings.register_profile("few", settings.get_profile("fixed"), max_examples=6)
    settings.load_profile("fixed")


# Tests call the plugin's entry points, and so does vLLM where it is imported while tests are collected: none of them
# changes what the others log. `test_log.py` has processes for that.
log.prepare = lambda: None
# What tests start compiles the modules of a released vLLM once, and not in each process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-versions", action="store_true", help="test every vLLM whose texts differ (default: a few)")
    parser.addoption("--vllm", metavar="VERSION", help="import this released vLLM's Python, not the installed vLLM")


def pytest_configure(config: pytest.Config) -> None:
    in_a_worker = hasattr(config, "workerinput")
    if version := config.getoption("--vllm"):
        try:
            releases.put_in_front(version)
        except ImportError as error:
            pytest.exit(f"vLLM {version} does not import here: {error!r}", releases.DOES_NOT_IMPORT)
        except IndexUnreachable as error:
            pytest.exit(f"vLLM {version} cannot be had: {error}")
    config.pluginmanager.register(Clock())
    if not in_a_worker:
        config.pluginmanager.register(Budget(config))
    if config.getoption("--all-versions"):
        # What its workers then find kept, and so all of them alike.
        index = Index(PipConfig(index_url="file:")) if in_a_worker else Index()
        for version in SUPPORTED:
            with contextlib.suppress(SourceError):
                CHECKSUMS[version] = IndexSource(version, index).checksums()


#: By version of vLLM, each Python file's CRC-32; empty where few versions are asked for.
CHECKSUMS: dict[str, dict[str, int]] = {}


def versions(*paths: str, among: Sequence[str] = SUPPORTED, each_text: bool = True) -> list[Any]:
    """Values for a parameter ``version`` of a test that reads these files of vLLM, as their text is.

    Those are the first version and the last, and as few more as have each hunk of the project's in these files; 0.26.0
    where there is none. With ``--all-versions`` the others are there as well, marked ``slow``, but for one whose files
    are byte by byte those of the version before it.

    Args:
        paths: files, and folders, which end with a slash; from ``vllm/`` on.
        among: versions, oldest first.
        each_text: whether `--all-versions` adds any.
    """
    made: list[Any] = []
    quick = {among[0], among[-1], *(_versions_of_hunks(paths, tuple(among)) or ["0.26.0"])}
    before: object = None
    for version in among:
        checksums = CHECKSUMS.get(version)
        texts = checksums and {path: of for path, of in checksums.items() if path.startswith(paths)}
        if version in quick:
            made.append(version)
        elif each_text and CHECKSUMS and (texts is None or texts != before):
            made.append(pytest.param(version, marks=pytest.mark.slow))
        before = texts
    return made


@functools.cache
def _versions_of_hunks(paths: tuple[str, ...], among: tuple[str, ...]) -> set[str]:
    """Return the ends, and the fewest versions more that have each hunk of these files; nothing where there is none."""
    having = [
        {version for version in among if all(one.covers(version) for one in (feature.versions, hunk.versions) if one)}
        for feature in load_catalogue().features
        for file in feature.files
        if file.path in paths
        for hunk in file.hunks
    ]
    chosen = {among[0], among[-1]} if any(having) else set[str]()
    while left := [one for one in having if one and one.isdisjoint(chosen)]:
        chosen.add(max(among, key=lambda version: sum(version in one for one in left)))
    return chosen


# What one process of the tests needs: vLLM and torch imported in it, and at times an engine beside it.
MEMORY_OF_A_PROCESS = 4 << 30


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many processes as there are cores to use, and memory for."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // MEMORY_OF_A_PROCESS))


#: Files that take minutes, longest first: what begins last ends when all others are done.
LONGEST = (
    *("test_model_runner_v2.py", "test_model_runner_v1.py", "test_engines.py", "test_nwor.py", "test_cpu_engine.py"),
    *("test_csrc.py", "test_starts.py", "test_port_csrc.py", "test_probe.py"),
)


# Before pytest chooses by markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = set()
    for item in items:
        if not {"vllm_tree", "released"}.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.network)
        if item.path.name in LONGEST:
            first.add(item.path)
        if item.get_closest_marker("engine") is not None or item.get_closest_marker("musa_sim") is not None:
            first.add(item.path)
            if item.get_closest_marker("smoke") is None:
                item.add_marker(pytest.mark.slow)
        # `test_releases.py` runs it with the newest release, which can be another than the installed one.
        if item.get_closest_marker("each_vllm") is not None:
            item.add_marker(pytest.mark.slow)
    # The quick ones fill the end, when there are fewer engines left than cores.
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (item.path not in first, places.get(item.path.name, len(LONGEST))))


def pytest_collection_finish() -> None:
    """Else each collection of garbage goes through some thousand tests, and all that was imported for them.

    `gc.get_referrers` does not see what is frozen, so a test that relies on it makes its own objects.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("each_vllm")
    if marker is not None:
        (name,) = marker.args
        feature, version = load_catalogue().feature(name), find_installed().version
        assert feature is not None
        if not feature.versions.covers(version):
            pytest.skip(f"{name} is not for vLLM {version}")
    if item.get_closest_marker("engine") is not None and importlib.util.find_spec("vllm") is None:
        cannot_run("no vLLM is installed")
    if item.get_closest_marker("gpu") is not None:
        if importlib.util.find_spec("torch") is None:
            pytest.skip("torch is not installed")
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no NVIDIA GPU")


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The plugin's second place for its cache lies there; what other processes of this user left is not to be seen."""
    folder = str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as patch:
        # Else it is in there, and each engine on a CPU has its functions compiled anew, by a process for each core.
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(platformdirs.user_cache_path("vllm-hwplugin-tests") / "inductor"))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session")
def cpu_host() -> Host:
    """Where vLLM runs on a CPU: with others on a GPU, texts and figures are not those that the tests expect."""
    host = detect_host()
    if host.device != "cpu":
        pytest.skip(f"what is expected is what vLLM does on a CPU; it runs on {host.device} here")
    return host


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As on a terminal: what a shell starts in the background ignores Ctrl-C, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hypothesis looks at each collection, and an interrupt is lost if it comes while it does.
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


class Tree:
    """One vLLM version as a source; a network that is missing when a file is first read skips the test."""

    def __init__(self, version: str, index: Index) -> None:
        try:
            self._source = IndexSource(version, index)
        except IndexUnreachable as error:
            cannot_run(str(error))
        self.version = self._source.version
        self.label = self._source.label

    def read(self, path: str) -> str | None:
        try:
            return self._source.read(path)
        except IndexUnreachable as error:
            cannot_run(str(error))

    def paths(self, *folders: str) -> list[str]:
        """The Python files in these folders, which end with a slash."""
        try:
            return [path for path in self._source.checksums() if path.startswith(folders)]
        except IndexUnreachable as error:
            cannot_run(str(error))


@pytest.fixture(scope="session")
def vllm_tree() -> Callable[[str], Tree]:
    """`vllm_tree("0.33.0")`: the Python text of a released vLLM, from the package index or the user's cache of it."""
    index = Index()
    trees: dict[str, Tree] = {}

    def tree(version: str) -> Tree:
        if version not in trees:
            trees[version] = Tree(version, index)
        return trees[version]

    return tree


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the modules put in the run record, by feature."""
    from vllm_hwplugin.base import run_records

    said: dict[str, str] = {}
    monkeypatch.setattr(run_records, "note", said.__setitem__)
    return said
