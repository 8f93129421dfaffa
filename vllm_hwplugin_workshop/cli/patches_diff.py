# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches diff`: print the diff of a feature."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from vllm_hwplugin.cli.parser import Parser
from vllm_hwplugin.cli.text import coloured
from vllm_hwplugin.patching.texts import FeatureVerdict, Source, Status

from ..sources import Index, open_installed, open_target
from ..verdicts import evaluate, render_diff
from ._drift_report import TargetReport, exit_status, summary
from ._lines import inert, note
from ._waiting import read_all, say_notes
from .catalogues import all_features, find_feature


def diff(arguments: Sequence[str]) -> int:
    """Print a feature's exact change to a version as a unified diff."""
    parser = Parser(
        "patches diff",
        "Print a feature's exact change to a vLLM, or to another distribution, as a unified diff.\n\n"
        "Exit status: 0 printed (empty if the feature is not needed), 1 the feature does not fit, 2 could not tell.",
        ["patches diff draft-full-graph", "patches diff draft-full-graph --vllm 0.33.0"],
    )
    parser.add_argument("feature", metavar="FEATURE", help="The feature's id, as `patches` lists it.")
    versions = parser.add_argument_group("versions")
    versions.add_argument(
        "--vllm",
        "--target",
        metavar="TARGET",
        help="A wheel file, a folder or a version, as for `drift`. Default: the installed version.",
    )
    options = parser.read(arguments)
    feature = find_feature(all_features(), options.feature)
    vllm = options.vllm
    index = Index()

    def read(target: str) -> tuple[Source, FeatureVerdict]:
        if vllm is None:
            source = open_installed(feature.distribution, [feature])
        else:
            source = open_target(target, index, feature.distribution)
        return source, evaluate(feature, source)

    ((source, verdict),) = read_all(read, [vllm or f"the installed {feature.target}"])
    if verdict.status is not Status.APPLIES:
        reason = f" ({verdict.reason})" if verdict.reason else ""
        note(f"{source.label}: {feature.id}: {summary(verdict)}{reason}")
        return exit_status([TargetReport(source.label, source.label, source.version, (verdict,))])
    text = render_diff(feature, source)
    say_notes(index.notes)
    if sys.stdout.isatty():
        text = "".join(coloured(inert(line), _colour(line)) + "\n" for line in text.splitlines())
    print(text, end="")
    return 0


def _colour(line: str) -> Literal["red", "green", ""]:
    return "" if line.startswith(("---", "+++")) else "red" if line[:1] == "-" else "green" if line[:1] == "+" else ""
