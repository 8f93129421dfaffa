"""install() from end to end, in fresh processes, on a made-up package."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_hwplugin import __version__

from .madeup import EDITS, GATES, OTHER_EDITS, Project

CHECK = """
    import inspect, linecache
    import vllm.v1.alpha as alpha, vllm.v1.beta as beta, vllm.v1.pack as pack, vllm.v1.pack.inner
    print(alpha.double(2), alpha.Runner().step(1), beta.quadruple(1), pack.name())
"""
PATCHED, STOCK = "6 11 9 patched pack", "4 2 4 stock pack"


def tree(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("variables", [{GATES[0]: "off"}, {"VLLM_HWPLUGIN": "0"}])
def test_a_gate_that_is_off_gives_stock_code(patched: Project, variables: dict[str, str]) -> None:
    code = """
        assert install().error is None
        import marshal, importlib.util, vllm.v1.alpha as alpha
        path = importlib.util.find_spec("vllm.v1.alpha").origin
        stock = compile(open(path).read(), path, "exec", dont_inherit=True)
        codes = {c.co_name: c for c in stock.co_consts if hasattr(c, "co_name")}
        assert alpha.double.__code__ == codes["double"] and alpha.double.__code__.co_filename == path
        assert not [f for f in sys.meta_path if type(f).__module__.startswith("vllm_hwplugin")]
        """
    patched.run(code, **variables)
    assert patched.run("install()", CHECK, **variables).strip() == STOCK
    assert not list(patched.cache.glob("overlay/*/*"))


@pytest.mark.parametrize("flag", [(), ("-O",), ("-OO",), ("-B",)])
def test_the_installed_package_is_not_touched(patched: Project, flag: tuple[str, ...]) -> None:
    subprocess.run([sys.executable, *flag, "-m", "compileall", "-q", str(patched.site)], check=True)
    before = tree(patched.site)
    assert any(name.endswith(".pyc") for name in before)
    for _ in range(2):
        assert patched.run("install()", CHECK, flags=flag).strip() == PATCHED
    assert tree(patched.site) == before
    assert list(patched.cache.rglob("alpha*.pyc"))


def test_installing_twice_and_from_many_threads_is_one_install(patched: Project) -> None:
    code = """
        import threading
        records = []
        threads = [threading.Thread(target=lambda: records.append(install())) for _ in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert len({id(r) for r in records}) == 1 and len(records) == 8
        assert len([f for f in sys.meta_path if type(f).__name__ == "CopyFinder"]) == 1
        """
    patched.run(code, CHECK)
    assert len(list(patched.cache.glob("records/*.json"))) == 1


@pytest.mark.parametrize("imported", ["alpha", "beta"])
def test_an_imported_module_is_patched_in_place(patched: Project, imported: str) -> None:
    code = f"""
        import vllm.v1.{imported}
        from vllm.v1.alpha import double, Runner
        runner = Runner()
        record = install()
        assert record.modules["vllm.v1.alpha"] == "re-applied", record.modules
        assert (double(2), runner.step(1)) == (6, 11)
        import inspect, vllm.v1.alpha as alpha
        assert "mul(value, 3)" in inspect.getsource(double) and double is alpha.double
        """
    assert patched.run(code, CHECK).strip() == PATCHED


@pytest.mark.parametrize("choice", ["auto", "on"])
def test_a_feature_that_is_not_reapplied_is_off_where_its_module_was_imported(project: Project, choice: str) -> None:
    project.feature("late", {"vllm/v1/alpha.py": EDITS["vllm/v1/alpha.py"][1:2]}, more="reapply = false")
    project.feature("other", {"vllm/v1/alpha.py": EDITS["vllm/v1/alpha.py"][2:3]}, gate=GATES[1])
    code = """
        record = install()
        import vllm.v1.alpha as alpha
        print(record.features["late"]["state"], record.modules, alpha.Runner().step(1))
        print(record.fingerprint)
        """
    before = project.run(code).splitlines()
    assert before[0] == "live {'vllm.v1.alpha': 'served'} 11"
    done = project.start("import vllm.v1.alpha", code, **{GATES[0]: choice})
    if choice == "on":
        assert "not in this process: vllm.v1.alpha was imported before the plugin" in done.stderr
        assert done.returncode != 0
        return
    # An engine's processes, of which only some have the feature, run one set of patches.
    assert done.stdout.splitlines() == ["off {'vllm.v1.alpha': 're-applied'} 11", before[1]]
    assert done.stderr == ""


VENDOR = """
    def vendor():
        # What vllm-musa's plugin does to vLLM: it imports much of it, rebinds names, and adds attributes.
        import vllm.v1.alpha as alpha, vllm.v1.pack as pack, vllm.v1.beta as beta
        beta.quadruple = lambda value: "rebound"
        alpha.Runner.added = lambda self: "added"
    """


@pytest.mark.parametrize("order", ["vendor(), install()", "install(), vendor()"])
def test_another_plugin_that_imports_and_rebinds_may_come_first_or_last(patched: Project, order: str) -> None:
    code = f"""
        {order}
        from vllm.v1.alpha import Runner
        assert Runner().added() == "added"
        """
    assert patched.run(VENDOR, code, CHECK).strip() == PATCHED.replace("9", "rebound")


PAST = """
    from importlib.machinery import PathFinder
    record = install()
    sys.meta_path.insert(0, PathFinder)
    import vllm.v1.alpha as alpha
    assert alpha.double(2) == 4
    def state(name):
        return record.features[name]["state"]
    """


def test_what_another_finder_served_is_found_and_patched_in_place(patched: Project) -> None:
    code = """
        def states():
            return [*record.modules.values()]
        print(states())
        _runtime.force()
        print(states(), alpha.double(2), record.modules["vllm.v1.alpha"])
        import vllm.v1.pack
        print(states(), vllm.v1.pack.name())
        _runtime.force()
        """
    assert patched.run(PAST, code).splitlines() == [
        "['pending', 'pending']",
        "['re-applied', 'pending'] 6 re-applied",
        "['re-applied', 'served'] patched pack",
    ]


def test_what_was_refused_at_the_start_stays_refused_at_the_second_look(project: Project) -> None:
    project.feature("early", {"vllm/v1/alpha.py": EDITS["vllm/v1/alpha.py"][2:3]})
    project.feature("other", OTHER_EDITS, gate=GATES[1])
    code = """
        from importlib.machinery import PathFinder
        import vllm.v1.alpha as alpha
        step, alpha.Runner.step = alpha.Runner.step, None
        record = install()
        alpha.Runner.step = step
        sys.meta_path.insert(0, PathFinder)
        import vllm.v1.beta as beta
        _runtime.force()
        print(record.live, record.modules, alpha.Runner().step(1))
        """
    assert project.run(code) == "('other',) {'vllm.v1.beta': 're-applied'} 2\n"


STATE = {"vllm/v1/alpha.py": [("LIMIT = 3", "LIMIT = 4")]}


def test_a_whole_feature_that_cannot_be_patched_in_place_is_given_up_alone(project: Project) -> None:
    project.feature("state", STATE)
    project.feature("other", OTHER_EDITS, gate=GATES[1])
    project.feature(
        "needs", {"vllm/v1/pack/__init__.py": EDITS["vllm/v1/pack/__init__.py"]}, gate=GATES[2], requires=["state"]
    )
    code = """
        import vllm.v1.beta as beta, vllm.v1.pack as pack
        for _ in range(2):
            _runtime.force()
        print(state("state"), state("other"), state("needs"), alpha.LIMIT, beta.quadruple(1), pack.name())
        print(list(record.modules.values()), record.features["state"]["reason"][:26])
        _runtime.force(in_place=False)
        """
    done = project.start(PAST, code)
    assert done.stdout.splitlines() == [
        "refused live refused 3 2 stock pack",
        "['stock', 're-applied', 'stock'] vllm.v1.alpha was imported",
    ]
    (line,) = done.stderr.splitlines()
    assert line.startswith("state, needs: not patched in, vLLM runs unpatched there: vllm.v1.alpha was imported")
    (written,) = (json.loads(path.read_text()) for path in project.cache.glob("records/*.json"))
    assert written["features"]["state"]["state"] == "refused"


SAID = """
    import logging
    levels = []
    class Levels(logging.Handler):
        def emit(self, entry):
            assert "\\n" not in entry.getMessage()
            levels.append(entry.levelname)
    log = logging.getLogger("vllm.hwplugin")
    log.addHandler(Levels())
    log.setLevel(logging.INFO)
    entry = install()
    state = entry.features["made-up"]["state"] if entry.error is None else "error"
    print(*sorted(levels, reverse=True), state)
    """


CHILD = "import multiprocessing; multiprocessing.current_process().name = 'EngineCore_0'"


def test_a_child_says_only_what_is_otherwise_than_in_the_first_process(patched: Project) -> None:
    first = patched.run("import os; install(); print(os.environ['VLLM_HWPLUGIN_FINGERPRINT'])").strip()
    other_release = first.replace(f" {__version__} ", " 0.1.0 ")
    cases = {first: "", first[1:]: "WARNING INFO ", other_release: "WARNING INFO ", "": "INFO "}
    for left, levels in cases.items():
        assert patched.run(CHILD, SAID, VLLM_HWPLUGIN_FINGERPRINT=left) == f"{levels}live\n"
    # Another choice is meant; and another engine's may have left it.
    assert patched.run(CHILD, SAID, VLLM_HWPLUGIN_FINGERPRINT=first, **{GATES[0]: "off"}) == "INFO off\n"
    assert patched.run(SAID, VLLM_HWPLUGIN_FINGERPRINT=first) == "INFO live\n"
    strict = {"VLLM_HWPLUGIN_STRICT": "1"}
    assert patched.start(CHILD, "install()", VLLM_HWPLUGIN_FINGERPRINT=first, **strict).returncode == 0
    assert patched.start(CHILD, "install()", VLLM_HWPLUGIN_FINGERPRINT=first[1:], **strict).returncode != 0
    # What a child left would be what its own children compare themselves with.
    left = "print(os.environ['VLLM_HWPLUGIN_FINGERPRINT'])"
    assert patched.run(CHILD, "import os; install()", left, VLLM_HWPLUGIN_FINGERPRINT=first[1:]) == f"{first[1:]}\n"
