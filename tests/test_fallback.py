from __future__ import annotations

from vllm_hwplugin.base import features
from vllm_hwplugin.patching import load_catalogue


def test_features_and_gates_are_the_catalogues():
    catalogue = {feature.id: feature.gate for feature in load_catalogue().features}
    named = {value for name, value in vars(features).items() if name.isupper() and name != "PREFIX"}
    assert named <= catalogue.keys()
    assert {name: features.gate_of(name) for name in catalogue} == catalogue
