# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches`: what the plugin changes in vLLM, for reading and review."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Sequence

from ..patching import load_catalogue
from .catalogues import all_features, find_feature, say_troubles, select
from .parser import FAILURE, Command, Parser
from .text import table

_WORKSHOP = "vllm_hwplugin_workshop.cli"
COMMANDS = {
    "show": Command(__name__, "show", "What a feature changes and why, and when it can go."),
    "diff": Command(f"{_WORKSHOP}.patches_diff", "diff", "The exact text change that a feature makes."),
    "import": Command(f"{_WORKSHOP}.patches_import", "import_change", "Make a feature of a diff, for many versions."),
    "edit": Command(f"{_WORKSHOP}.patches_edit", "edit", "Open a work tree of one vLLM with a feature applied."),
    "save": Command(f"{_WORKSHOP}.patches_edit", "save", "Give the feature what was edited in a work tree."),
    "check": Command(f"{_WORKSHOP}.patches_check", "check", "Check catalogues of patches, on every version."),
}


def patches(arguments: Sequence[str]) -> int:
    """List the features, or run one of the commands about them."""
    parser = Parser(
        "patches",
        "List the patches and their exact text changes; import and check others.\n\n"
        "Without a command: one line a feature with its gate and versions, the plugin's "
        "own and those of catalogues from outside. Exit status 2 where one of these "
        "cannot be used.",
        ["patches", "patches show draft-full-graph"],
        COMMANDS,
    )
    _, command = parser.choose(arguments)
    return _list() if command is None else command()


def _list() -> int:
    selection = select(load_catalogue())
    if sys.stdout.isatty():
        rows = [(one.id, one.title, one.gate, f"{one.target} {one.versions}") for one in selection.chosen]
        print(table(("feature", "what", "gate", "versions"), rows))
    else:
        for one in selection.chosen:
            print(f"{one.id}: {one.title}; gate {one.gate}; {one.target} {one.versions}")
    say_troubles(selection)
    return FAILURE if selection.troubles else 0


def show(arguments: Sequence[str]) -> int:
    """What a feature changes and why, where it comes from, and when it can go."""
    parser = Parser(
        "patches show",
        "Show what a feature changes and why, where it comes from, and when it can go.",
        ["patches show draft-full-graph", "patches show v2-tail-graph"],
    )
    parser.add_argument("feature", metavar="FEATURE", help="The id of a feature, as `patches` lists them.")
    found = find_feature(all_features(), parser.read(arguments).feature)
    print(f"{found.id}: {found.title}\n")
    print(_paragraph(found.what) + "\n")
    print(f"gate:     {found.gate}")
    print(f"origin:   {found.origin}")
    print(f"requires: {', '.join(found.requires) or 'nothing'}")
    print(f"removal:  {' '.join(found.removal.split())}")
    for gap in found.not_needed:
        print(f"not needed on {found.target} {gap.versions}: {' '.join(gap.reason.split())}")
    print(f"\non {found.target} {found.versions}:")
    for file in found.files:
        print(f"  {file.path}: {len(file.hunks)} hunk{'' if len(file.hunks) == 1 else 's'} ({file.origin})")
        for text, count in Counter(str(hunk.versions) for hunk in file.hunks if hunk.versions is not None).items():
            print(f"    {count} of them on {text}")
    return 0


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), width=100)
