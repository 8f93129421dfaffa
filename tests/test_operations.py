# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts of docs/operations.md ask for metrics, labels and outcomes that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.patching.texts import Source
from vllm_hwplugin.spec_decode.step_metrics import StepCounters

DOCS = Path(__file__).parents[1] / "docs"
DASHBOARD, RULES = DOCS / "grafana-dashboard.json", DOCS / "prometheus-rules.yaml"
VLLM_METRICS = ("vllm/v1/metrics/loggers.py", "vllm/v1/spec_decode/metrics.py")
#: Which Prometheus adds, and histograms have.
SCRAPED = {"job", "instance", "le"}


class Counter:
    """As prometheus_client's, whose samples end with `_total`."""

    made: Counter

    def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
        self.name, self.labelnames = name, labelnames
        Counter.made = self


def counter(labels: list[str]) -> Counter:
    StepCounters(Counter, labels, {})
    return Counter.made


def expressions() -> Iterator[str]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


@pytest.mark.parametrize("version", [SUPPORTED[0], SUPPORTED[-1]])
def test_each_metric_and_each_label_is_there(version: str, vllm_tree: Callable[[str], Source]) -> None:
    source = vllm_tree(version)
    text = "\n".join(source.read(path) or "" for path in VLLM_METRICS)
    (labels,) = re.findall(r"labelnames = \[(.*?)\]", text)
    plugin = counter(re.findall(r'"(\w+)"', labels))
    known = {*re.findall(r'"(vllm:\w+)"', text), plugin.name}
    asked: set[str] = set()
    for expression in expressions():
        assert expression.count("(") == expression.count(")")
        metrics = set(re.findall(r"vllm:\w+", expression))
        assert metrics
        assert {re.sub("_(total|bucket)$", "", metric) for metric in metrics} <= known
        grouped = [
            name.strip() for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for name in names.split(",")
        ]
        matched = re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression)
        assert {*grouped, *matched} <= SCRAPED | {*plugin.labelnames}
        asked |= metrics
    assert "vllm:hwplugin_steps_total" in asked


def promtool(what: str, file: Path, content: dict[str, object]) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool here: the Debian package prometheus has it")
    file.write_text(yaml.safe_dump(content))
    done = subprocess.run([program, what, "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_each_expression(tmp_path: Path) -> None:
    texts = [re.sub(r"\$\w+", lambda name: "5m" if "interval" in name[0] else ".*", text) for text in expressions()]
    rules = [{"record": f"vllm:number_{number}", "expr": text} for number, text in enumerate(texts)]
    promtool("check", tmp_path / "rules.yaml", {"groups": [{"name": "all", "rules": rules}]})
