# SPDX-License-Identifier: Apache-2.0
"""The table of environment variables, its parser, and what vLLM is told about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace

import pytest
import tomllib
from hypothesis import given
from hypothesis import strategies as st

from vllm_hwplugin.base import gates
from vllm_hwplugin.base.gates import WORDS_FALSE, WORDS_TRUE
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin.patching.texts import default_folder

from . import gates_page

OF_FEATURES = load_catalogue().gates
BY_NAME = {gate.name: gate for gate in (*gates.GATES, *OF_FEATURES)}
GRAPH = BY_NAME["VLLM_HWPLUGIN_DRAFT_FULL_GRAPH"]
ALIASES = [(gate, alias) for gate in BY_NAME.values() for alias in gate.aliases]


def settings_of(environ: Mapping[str, str], more: Iterable[gates.Gate] = OF_FEATURES) -> gates.Settings:
    settings = gates.Settings(environ)
    settings.read(more)
    return settings


WORDED = [gate for gate in BY_NAME.values() if gate.kind == "bool" or gate.choices]
OUTSIDE = [gates.feature_gate(f"{gates.CATALOGUE_PREFIX}ACME_{name}", "a fix", catalogue="acme") for name in "AB"]
UNKNOWN = [f"{gates.CATALOGUE_PREFIX}ACNE_{name}" for name in "AB"]
NAMES = [name for gate in WORDED for name in (gate.name, *(alias.name for alias in gate.aliases))]
#: Switches of what is no feature.
GRAPHS = {gates.PLAIN_DECODE, gates.MORE_GRAPHS}
PARTS = {"VLLM_HWPLUGIN_OPS", "VLLM_HWPLUGIN_ATTENTION", *GRAPHS}
WORDS = ["1", "0", "true", "No", "ON", "off", "auto", "musa", "stage", "scrub", "trtllm", "perhaps", "", "  "]


def model(gate: gates.Gate, environ: Mapping[str, str]) -> gates.Value:
    """What docs/gates.md says of a gate's value; None where it is bad."""
    said = {name: raw.strip().lower() for name, raw in environ.items() if raw.strip()}
    ways = [(gate.name, None), *((alias.name, alias.mapping) for alias in gate.aliases)]
    for name, mapping in ways:
        if name in said:
            word = said[name] if mapping is None else mapping.get(said[name], "bad")
            if gate.kind == "bool":
                return {**dict.fromkeys(WORDS_TRUE, True), **dict.fromkeys(WORDS_FALSE, False)}.get(word)
            if gate.kind == "switch":
                word = {**dict.fromkeys(WORDS_TRUE, "on"), **dict.fromkeys(WORDS_FALSE, "off")}.get(word, word)
            if gate.kind == "list":
                return (word,) if word in gate.choices else None
            return word if word in gate.choices else None
    return gate.default


@given(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(WORDS)),
    st.fixed_dictionaries({name: st.sampled_from(WORDS) for name in (*(gate.name for gate in OUTSIDE), *UNKNOWN)}),
)
def test_every_environment_is_read_as_the_page_says(own: dict[str, str], outside: dict[str, str]) -> None:
    environ = {name: f" {raw}" for name, raw in (own | outside).items()}
    expected = {gate.name: model(gate, environ) for gate in (*WORDED, *OUTSIDE)}
    bad = [name for name, value in expected.items() if value is None]
    for gate in (*WORDED, *OUTSIDE):
        if gate.name not in bad:
            assert gates.read(gate, environ).value == expected[gate.name]
    settings = settings_of(environ, (*OF_FEATURES, *OUTSIDE))
    assert {*settings.errors} == {*bad}
    of_features = {gate.name for gate in (*BY_NAME.values(), *OUTSIDE) if gate.of_feature}
    of_parts = PARTS if expected[gates.STRICT] is False else set()
    assert len(settings.process_errors) == len({*bad} - of_features - of_parts)
    assert len(settings.part_errors) == len({*bad} & PARTS)
    assert settings.choices == {
        name: expected[name] if expected[name] in ("on", "off") else "auto" for name in of_features
    }
    demanded = [name for name in sorted(UNKNOWN) if environ.get(name, "").strip().lower() in WORDS_TRUE]
    assert list(settings.unclaimed) == demanded
    assert settings.strict is (expected[gates.STRICT] is not False)
    assert settings.demanded is (settings.strict or "on" in settings.choices.values() or bool(demanded))


@pytest.mark.parametrize(
    ("name", "raw", "good"),
    [
        ("VLLM_HWPLUGIN", "maybe", "1, 0"),
        ("VLLM_HWPLUGIN_CACHE_DIR", "relative/folder", "an absolute path"),
        ("VLLM_HWPLUGIN_CACHE_DIR", "~no-such-user/folder", "an absolute path"),
        ("VLLM_HWPLUGIN_NWOR_MODE", "immediate", "off, restore, scrub, stage"),
        (gates.MORE_GRAPHS, "trtllm, mla", "commas: trtllm, image-spans, mla-prompts"),
    ],
)
def test_a_bad_value_names_the_variable_and_lists_the_good_ones(name: str, raw: str, good: str) -> None:
    with pytest.raises(gates.GateError) as error:
        gates.read(BY_NAME[name], {name: raw})
    message = str(error.value)
    assert name in message
    assert repr(raw) in message
    assert good in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("own", "alias", "conflict"),
    [("on", "0", True), ("on", "1", False), ("off", "0", False), ("off", "perhaps\n", True)],
)
def test_own_name_wins_over_its_alias_and_says_so_where_that_says_something_else(
    own: str, alias: str, conflict: bool
) -> None:
    found = gates.read(GRAPH, {GRAPH.name: own, "VLLM_MUSA_DRAFT_FULL_WRAP": alias})
    assert (found.value, found.source) == (own, "environment")
    assert ("VLLM_MUSA_DRAFT_FULL_WRAP" in (found.conflict or "")) == conflict
    assert (found.conflict or " ").isprintable(), "one line, whatever it holds"


def test_a_misspelt_gate_is_found_with_the_name_that_was_meant() -> None:
    environ = {"VLLM_HWPLUGIN_DRAFT_FUL_GRAPH": "off", GRAPH.name: "on", gates.FINGERPRINT: "abc", "VLLM_USE_V1": "1"}
    (line,) = settings_of(environ).unknown()
    assert line.startswith("VLLM_HWPLUGIN_DRAFT_FUL_GRAPH is set")
    assert line.endswith(f"did you mean {GRAPH.name}?")
    (line,) = settings_of({"VLLM_MUSA_EAGLE_RUNNER": "1"}).unknown()
    assert "VLLM_HWPLUGIN_DRAFT_LOOP_GRAPH" in line
    # One of a catalogue that is not in force has no other name.
    (line,) = settings_of({f"{gates.CATALOGUE_PREFIX}ACME_FIX": "on"}).unknown()
    assert line.endswith("its folder must be in VLLM_HWPLUGIN_PATCHES")


def _key_with(monkeypatch: pytest.MonkeyPatch, **environ: str) -> dict[str, object]:
    """The part of vLLM's compile key that is the plugin's, as ``compile_factors()`` computes it."""
    for name in [gates.FINGERPRINT] + [gate.name for gate in BY_NAME.values()] + [alias.name for _, alias in ALIASES]:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    envs = SimpleNamespace(environment_variables={})
    gates.register_with_vllm(envs, OF_FEATURES)
    return {name: getter() for name, getter in envs.environment_variables.items()}


@pytest.mark.parametrize("name", [name for gate in BY_NAME.values() for name in gate.variables])
def test_vllm_knows_every_variable_that_is_set_where_the_plugin_is_off(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No catalogue is read then, so it is not known which variables features have."""
    monkeypatch.setenv(name, "0")
    envs = SimpleNamespace(environment_variables={})
    gates.register_with_vllm(envs)
    assert name in envs.environment_variables


#: Why what vLLM has compiled may serve with another value. Features that change no compiled code declare it themselves.
NOT_COMPILED = {
    gates.STRICT: "it decides whether a process ends",
    "VLLM_HWPLUGIN_CACHE_DIR": "the same texts lie elsewhere",
    "VLLM_HWPLUGIN_PATCHES": "the fingerprint has the texts of the patches",
    "VLLM_HWPLUGIN_PLATFORM": "vLLM's key has the platform",
    "VLLM_HWPLUGIN_ATTENTION": "vLLM's key has the attention backend",
    "VLLM_HWPLUGIN_OPS": "another kernel under the same operation",
    "VLLM_HWPLUGIN_OPS_SKIP": "another kernel under the same operation",
    "VLLM_HWPLUGIN_SELF_TEST": "it decides whether a process ends",
    "VLLM_HWPLUGIN_SLP": "kernels have a key of their own",
    "VLLM_HWPLUGIN_LOAD_CLUSTER": "kernels have a key of their own",
    "VLLM_HWPLUGIN_CAPTURE_SIZES": "vLLM's key has the sizes that it compiles for",
    **dict.fromkeys(GRAPHS, "graphs are recorded at each start"),
    "VLLM_HWPLUGIN_NWOR_MODE": "it works between steps",
    "VLLM_HWPLUGIN_V2_DRAFT_HEAD": "vLLM compiles no head",
    "VLLM_HWPLUGIN_NWOR_EMIT_METRICS": "it counts",
    "VLLM_HWPLUGIN_NWOR_DEBUG_SYNC": "it compares after a step",
}


def test_every_variable_changes_the_compile_key_or_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _key_with(monkeypatch)
    other: dict[str, str] = {"bool": "0", "path": "/elsewhere", "paths": "/elsewhere", "list": "rms_norm"}
    same = set()
    for name, gate in BY_NAME.items():
        value = next((one for one in gate.choices if one != gate.default), other.get(gate.kind, ""))
        values = {name: "1" if gate.default is False else value}
        if _key_with(monkeypatch, **values) == plain:
            same.add(name)
        monkeypatch.delenv(name)
    folder = default_folder()
    declared = {
        item.gate
        for item in load_catalogue().features
        if not tomllib.loads((folder / item.home / "patch.toml").read_text()).get("compile_key", True)
    }
    assert same == NOT_COMPILED.keys() | declared
    # An older name and a bad value count, too.
    assert _key_with(monkeypatch, VLLM_MUSA_DRAFT_FULL_WRAP="0") != plain
    assert _key_with(monkeypatch, VLLM_HWPLUGIN_DRAFT_FULL_GRAPH="nonsense") != plain


@pytest.mark.parametrize(
    ("catalogue", "name"), [("vllm", "VLLM_PORT"), ("vllm-port", "VLLM_PORT_FIX"), ("acme", "PATH")]
)
def test_a_catalogue_takes_no_variable_of_vllm_or_of_others(catalogue: str, name: str) -> None:
    assert gates.feature_gate("ACME_FIX", "a fix", catalogue="acme").name == "ACME_FIX"
    with pytest.raises(gates.GateError, match=f"'{name}' is no name for a switch"):
        gates.feature_gate(name, "a fix", catalogue=catalogue)


def test_the_documentation_page_is_what_the_table_says() -> None:
    assert gates_page.PAGE.read_text(encoding="utf-8") == gates_page.markdown(), "run `make docs`"
