# SPDX-License-Identifier: Apache-2.0
"""The pages, and the results files that each is made from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_hwplugin.base.terms import TERMS, VALUES
from vllm_hwplugin_lab.bench.plan import TINY

from . import (
    _drafters,
    _engine_tables,
    _engines,
    _host_time,
    _kernel_tables,
    _kernels,
    _musa_versions,
    _readme_tables,
    _serve_tables,
)
from ._gains import gains
from ._read import Found, ResultsError, read_all, recent
from ._text import table

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = "benchmarks/results"
RESULTS = ROOT / _FOLDER
#: Page that compares a step with and without a feature -> prefix of its files.
_COSTS = {
    "docs/nwor.md": "cost-nwor-",
    "docs/kernels.md": "cost-ops-",
}
#: Page of a feature that is off by default -> its variable.
_OFF_BY_DEFAULT = {
    "docs/draft-head.md": "VLLM_HWPLUGIN_V2_DRAFT_HEAD",
    "docs/draft-schedule.md": "VLLM_HWPLUGIN_DRAFT_SCHEDULE",
    "docs/model-runner-v2.md": "VLLM_HWPLUGIN_PLAIN_DECODE",
}


def pages(root: Path = ROOT) -> dict[str, str]:
    """Return the text of every page but the drawings, by path.

    Args:
        root: the source tree.

    Raises:
        ResultsError: a results file cannot be used, or a page lacks the place for its table.
    """
    results = root / _FOLDER
    engines, soaks = read_all(results, "engines-"), read_all(results, "soak-")
    kernels = [*read_all(results, "kernels-attention-"), *read_all(results, "kernels-ops-")]
    phases, served = read_all(results, "phases-"), read_all(results, "serve-")
    headline, clients = _serve_tables.first_screen(served)
    return {
        "README.md": _within(
            root,
            "README.md",
            headline=headline,
            clients=clients,
            costs=_readme_tables.starts_in_short(read_all(results, "starts-")),
        ),
        "docs/your-own-patches.md": _within(root, "docs/your-own-patches.md", terms=_terms()),
        "docs/features.md": _within(root, "docs/features.md", drafters=_drafters.by_runner()),
        **{
            page: _within(root, page, costs=_readme_tables.costs(read_all(results, kind)))
            for page, kind in _COSTS.items()
        },
        **{
            page: _within(
                root,
                page,
                measured=_serve_tables.features(served, name),
                **({"accepted": _serve_tables.accepted(served, name)} if page == "docs/draft-head.md" else {}),
            )
            for page, name in _OFF_BY_DEFAULT.items()
        },
        "docs/platforms.md": _within(root, "docs/platforms.md", versions=_musa_versions.markdown()),
        "docs/benchmarks.md": _engines.page(engines, soaks, read_all(results, "starts-"), served),
        "docs/kernel-benchmarks.md": _kernels.page(kernels),
        "benchmarks/results/engines.md": _engine_tables.markdown(engines),
        "benchmarks/results/kernels.md": _kernel_tables.markdown(kernels),
        **({"benchmarks/results/serve.md": _serve_tables.markdown(served)} if served else {}),
        **({"docs/host-time.md": _host_time.page(phases)} if phases else {}),
    }


def _terms() -> str:
    """Return the table of what `uses_when` may state."""
    names = {name: name + ",".join(VALUES.get(name, ("...",) if name.endswith(":") else ())) for name in TERMS}
    rows = [(f"`{names[name]}`", reason.replace("{}", "...")) for name, reason in TERMS.items()]
    return "\n".join(table(("term", "the engine does not use the feature, because"), rows))


def outdated(root: Path = ROOT) -> list[str]:
    """Return the paths of pages that differ from the results files."""
    return [path for path, text in pages(root).items() if _text(root / path) != text]


def drawings(root: Path = ROOT) -> dict[str, str]:
    """Return the drawings by path; their text depends on matplotlib's version."""
    from . import _chart

    results = root / _FOLDER
    engines, page = read_all(results, "engines-"), root / "docs" / "compatibility.md"
    return {
        "docs/benchmarks.svg": _chart.steps(gains(engines)),
        "docs/gain.svg": _chart.idle_and_gain([gain for gain in gains(recent(engines)) if gain.shape != TINY]),
        "docs/step.svg": _chart.step_in_time(read_all(results, "phases-")),
        "docs/served.svg": _chart.served(_of_v2(read_all(results, "serve-")), "mrv2-patched"),
        "docs/compatibility.svg": _chart.compatibility(page.read_text(encoding="utf-8")),
    }


def _of_v2(files: Sequence[Found]) -> Found:
    """Return the newest file of Eagle3 on V2 with most loads.

    Raises:
        ResultsError: there is none.
    """
    fitting = [
        file
        for file in _serve_tables.over_http(files)
        if file.results["settings"]["method"] == "eagle3"
        and all("mrv2-patched" in case["sides"] for case in file.results["cases"])
        and file.results["settings"]["tensor_parallel_size"] == 1
    ]
    if not fitting:
        raise ResultsError(f"no file {_FOLDER}/serve-*.json of Eagle3 on Model Runner V2 for served.svg")
    return max(fitting, key=lambda file: (len(file.results["settings"].get("concurrency", ())), file.results["date"]))


def write(root: Path = ROOT) -> None:
    for path, text in (pages(root) | drawings(root)).items():
        (root / path).write_text(text, encoding="utf-8")


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _within(root: Path, page: str, **tables: str) -> str:
    """Return a page with tables replaced, between lines with their names."""
    text = (root / page).read_text(encoding="utf-8")
    for name, body in tables.items():
        begin, end = f"<!-- {name}: made by `make docs` -->", f"<!-- {name}: end -->"
        before, begins, rest = text.partition(begin)
        _, ends, after = rest.partition(end)
        if not begins or not ends:
            raise ResultsError(f"{page}: the lines {begin} and {end} around the table are missing")
        text = f"{before}{begin}\n{body}\n{end}{after}"
    return text
