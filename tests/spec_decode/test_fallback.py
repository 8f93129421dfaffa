from __future__ import annotations

import pytest

from vllm_hwplugin.spec_decode.fallback import FeatureRequired, stays_stock

GATE = "VLLM_HWPLUGIN_DRAFT_FULL_GRAPH"


@pytest.mark.parametrize("choice", [None, "auto", "off"])
def test_it_is_put_on_record(notes, monkeypatch, choice):
    monkeypatch.delenv(GATE, raising=False)
    if choice is not None:
        monkeypatch.setenv(GATE, choice)
    stays_stock("draft-full-graph", GATE, "as in stock", "no graphs")
    assert notes == {"draft-full-graph": "as in stock: no graphs"}


def test_a_required_feature_is_an_error_with_the_way_out(notes, monkeypatch):
    monkeypatch.setenv(GATE, "on")
    with pytest.raises(FeatureRequired, match=f"{GATE}=on, but draft-full-graph .* no graphs; set {GATE}=auto"):
        stays_stock("draft-full-graph", GATE, "as in stock", "no graphs")
    assert notes == {}
