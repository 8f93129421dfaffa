"""Half a feature is never in force: races with imports, and errors while modules get new code."""

from __future__ import annotations

import json

from .madeup import EDITS, GATES, Project
from .test_runtime import CHECK, STOCK

FINDERS = "[f for f in sys.meta_path if type(f).__name__ == 'CopyFinder']"
# A user's filter that fails on the line that says what is live.
FAILS = """
    import logging
    logging.getLogger("vllm.hwplugin").setLevel(logging.INFO)
    logging.getLogger("vllm.hwplugin").addFilter(lambda entry: entry.levelno != logging.INFO or 1 / 0)
"""


def test_an_error_after_code_was_swapped_takes_it_back_and_the_record_says_so(patched: Project) -> None:
    code = f"""
        import vllm.envs
        from vllm.v1.alpha import double
        record = install()
        assert double(2) == 4
        assert (record.live, record.modules, record.fingerprint) == ((), {{}}, "none"), record
        assert "ZeroDivisionError" in record.error
        assert not {FINDERS}
        assert vllm.envs.compile_factors()["VLLM_HWPLUGIN_FINGERPRINT"] == "none"
        """
    assert patched.run(FAILS, code, CHECK).strip() == STOCK
    (written,) = (json.loads(path.read_text()) for path in patched.cache.glob("records/*.json"))
    assert "ZeroDivisionError" in written["error"]
    required = patched.start(FAILS, code, CHECK, **{GATES[0]: "on"})
    last = required.stderr.splitlines()[-1]
    assert "InstallError: a bug in vllm-hwplugin" in last
    assert "ZeroDivisionError" in last


def test_where_the_second_of_two_imported_modules_takes_nothing_the_first_is_as_it_was(project: Project) -> None:
    fails = [("from vllm.v1.alpha import double", "from vllm.v1.alpha import double\nimport there_is_none")]
    project.feature("made-up", {**EDITS, "vllm/v1/beta.py": fails})
    code = f"""
        import vllm.v1.beta
        record = install()
        assert (record.live, record.modules) == ((), {{}}), record
        assert "there_is_none" in record.features["made-up"]["reason"]
        assert not {FINDERS}
        """
    assert project.run(code, CHECK).strip() == STOCK


def test_a_module_that_only_the_new_text_imports_is_on_record_as_served(project: Project) -> None:
    alpha = [("import os", "import os\nimport vllm.v1.pack as pack"), ("return value * 2", "return pack.name()")]
    project.feature("made-up", {**EDITS, "vllm/v1/alpha.py": alpha})
    code = """
        import vllm.v1.alpha as alpha
        record = install()
        assert record.modules == {"vllm.v1.alpha": "re-applied", "vllm.v1.pack": "served"}, record.modules
        print(alpha.double(2))
        """
    assert project.run(code) == "patched pack\n"
    # It cannot be taken back, so after an error the process must not go on.
    last = project.start(FAILS, code).stderr.splitlines()[-1]
    assert "vllm.v1.pack run patched already: start again with VLLM_HWPLUGIN=0" in last


def test_after_a_lost_race_no_finder_comes_back(project: Project) -> None:
    edits = {**EDITS, "vllm/v1/alpha.py": [("LIMIT = 3", "LIMIT = 4")]}
    project.feature("state", edits)
    code = f"""
        real = _runtime.CopyFinder
        def overtaken(*arguments):
            # What another thread imports after the modules were looked at and before the finder is there.
            import vllm.v1.alpha
            return real(*arguments)
        _runtime.CopyFinder = overtaken
        assert install().features["state"]["state"] == "refused"
        install()
        assert not {FINDERS}
        """
    assert project.run(code, CHECK).strip() == STOCK
