"""What a process will run: whole features or none of one, and the reason for each."""

from __future__ import annotations

import pytest

from vllm_hwplugin.patching import Catalogue, Feature, find_unneeded, make_plan
from vllm_hwplugin.patching.texts import Plan, Source

from .texts import ALPHA, GATE, GATE_2, OTHER, PATH, Memory, feature, file_diff

BETA = ALPHA.replace("line", "row")
ONE = feature(
    file_diff(ALPHA, ALPHA.replace("line 3\n", "line three\n")),
    file_diff(BETA, BETA.replace("row 9\n", "row nine\n"), OTHER),
)
TWO = feature(file_diff(ALPHA, ALPHA.replace("line 15\n", "line 15\nand more\n")), name="two", gate=GATE_2)
BOTH = Memory({PATH: ALPHA, OTHER: BETA})


def states(plan: Plan) -> dict[str, str]:
    return {name: item.state for name, item in plan.features.items()}


def plan_of(*features: Feature, source: Source = BOTH, try_unlisted: bool = False, **choices: str) -> Plan:
    return make_plan(Catalogue(features), source, choices, try_unlisted=try_unlisted)


def test_live() -> None:
    plan = plan_of(ONE, TWO)
    assert states(plan) == {"one": "live", "two": "live"}
    assert (plan.version, plan.errors, list(plan.files)) == ("0.32.0", (), [PATH, OTHER])
    alpha = plan.files[PATH]
    assert (alpha.path, alpha.module, alpha.features) == (PATH, "vllm.v1.alpha", ("one", "two"))
    assert alpha.text == ALPHA.replace("line 3\n", "line three\n").replace("line 15\n", "line 15\nand more\n")
    assert plan.files[OTHER].features == ("one",)
    verdict = plan.features["one"].verdict
    assert verdict is not None
    assert verdict.exact


def test_requirement() -> None:
    needs = TWO._replace(requires=("one",))
    assert states(plan_of(ONE, needs)) == {"one": "live", "two": "live"}
    off = plan_of(ONE, needs, **{GATE: "off", GATE_2: "on"})
    assert states(off) == {"one": "off", "two": "refused"}
    assert f"{GATE}=off" in off.features["two"].reason
    assert (off.files, len(off.errors)) == ({}, 1)
    further = feature(file_diff(BETA, BETA + "z\n", OTHER), name="three")._replace(requires=("two",), gate=GATE_2)
    assert states(plan_of(ONE, needs, further, **{GATE: "off"})) == {"one": "off", "two": "off", "three": "off"}


@pytest.mark.parametrize("drifted", [False, True])
def test_what_requires_a_feature_that_was_switched_off_is_off_too(drifted: bool) -> None:
    """Strict mode has nothing to say against it, also where its own text would not fit."""
    needs = TWO._replace(requires=("one",))
    source = Memory({PATH: ALPHA.replace("line 15\n", "LINE 15\n") if drifted else ALPHA, OTHER: BETA})
    plan = make_plan(Catalogue((ONE, needs)), source, {GATE: "off"}, strict=True)
    assert (states(plan), plan.errors) == ({"one": "off", "two": "off"}, ())
    # What cannot be had is another matter than what was not wanted.
    lost = make_plan(Catalogue((ONE, needs)), source, {}, refused={"one": "imported too early"})
    assert states(lost) == {"one": "refused", "two": "refused"}
    if not drifted:
        assert "imported too early" in lost.features["two"].reason
    both = feature(file_diff(BETA, BETA + "z\n", OTHER), name="three")._replace(requires=("two", "one"), gate=GATE_2)
    unwanted = make_plan(Catalogue((ONE, TWO, both)), source, {GATE: "off"}, refused={"two": "imported too early"})
    assert states(unwanted) == {"one": "off", "two": "refused", "three": "off"}


def test_fingerprint_names_what_is_in_force() -> None:
    both, one, two = plan_of(ONE, TWO), plan_of(ONE), plan_of(TWO)
    assert len({both.fingerprint, one.fingerprint, two.fingerprint, "none"}) == 4
    assert len(both.fingerprint) == 16
    assert plan_of(TWO, ONE).fingerprint == both.fingerprint
    assert plan_of(ONE, TWO, **{GATE_2: "off"}).fingerprint == one.fingerprint
    moved = Memory({PATH: ALPHA + "end\n", OTHER: BETA})
    assert plan_of(ONE, TWO, source=moved).fingerprint != both.fingerprint


def test_an_own_feature_for_other_hosts_is_not_needed_also_where_it_is_demanded() -> None:
    here, elsewhere = ONE._replace(companion="pytest>=1"), TWO._replace(companion="pytest<1")
    unneeded = find_unneeded((here, elsewhere))
    plan = make_plan(Catalogue((here, elsewhere)), BOTH, {GATE_2: "on"}, strict=True, unneeded=unneeded)
    assert (states(plan), plan.errors) == ({"one": "live", "two": "not-needed"}, ())
    assert plan.features["two"].reason.startswith("it needs pytest<1, and pytest ")
    # Another tool than a process asks whether the hunks fit, on any host.
    assert states(plan_of(here, elsewhere)) == {"one": "live", "two": "live"}
