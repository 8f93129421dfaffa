from __future__ import annotations

import pytest

from vllm_hwplugin.base import features
from vllm_hwplugin.base.fallback import FeatureRequired, report_unused
from vllm_hwplugin.patching import load_catalogue

GATE = "VLLM_HWPLUGIN_DRAFT_FULL_GRAPH"


@pytest.mark.parametrize("choice", [None, "auto", "off"])
def test_it_is_put_on_record(notes, monkeypatch, choice):
    monkeypatch.delenv(GATE, raising=False)
    if choice is not None:
        monkeypatch.setenv(GATE, choice)
    report_unused("draft-full-graph", "as in stock", "no graphs")
    assert notes == {"draft-full-graph": "as in stock: no graphs"}


def test_a_required_feature_is_an_error_with_the_way_out(notes, monkeypatch):
    monkeypatch.setenv(GATE, "on")
    with pytest.raises(FeatureRequired, match=f"{GATE}=on, but draft-full-graph .* no graphs; set {GATE}=auto"):
        report_unused("draft-full-graph", "as in stock", "no graphs")
    assert notes == {}


def test_features_and_gates_are_the_catalogues():
    catalogue = {feature.id: feature.gate for feature in load_catalogue().features}
    named = {value for name, value in vars(features).items() if name.isupper() and name != "PREFIX"}
    assert named <= catalogue.keys()
    assert {name: features.gate_of(name) for name in catalogue} == catalogue
