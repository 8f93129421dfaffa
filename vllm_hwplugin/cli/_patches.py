# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches`: what the plugin changes in vLLM, for reading and review."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from ..patching import load_catalogue
from .catalogues import all_features, find_feature, say_troubles, select
from .output import STANDARD_OUTPUT, add_optional_json, as_objects, print_rows, write_json
from .parser import FAILURE, Command, Parser

_WORKSHOP = "vllm_hwplugin_workshop.cli"
COMMANDS = {
    "list": Command(__name__, "list_", "The features, with their gates and versions; the default."),
    "show": Command(__name__, "show", "What a feature changes and why, and when it can go."),
    "diff": Command(f"{_WORKSHOP}.patches_diff", "diff", "The exact text change that a feature makes."),
    "import": Command(f"{_WORKSHOP}.patches_import", "import_change", "Make a feature of a diff, for many versions."),
    "edit": Command(f"{_WORKSHOP}.patches_edit", "edit", "Open a work tree of one vLLM with a feature applied."),
    "save": Command(f"{_WORKSHOP}.patches_edit", "save", "Give the feature what was edited in a work tree."),
    "carry": Command(f"{_WORKSHOP}.patches_carry", "carry", "Carry a catalogue to a new release of vLLM."),
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
        ["patches list", "patches show draft-full-graph"],
        COMMANDS,
    )
    if list(arguments[:1]) == ["--json"]:
        return list_(arguments)
    _, command = parser.choose(arguments)
    return list_([]) if command is None else command()


def list_(arguments: Sequence[str]) -> int:
    """List the features."""
    parser = Parser(
        "patches list",
        "List the features, the plugin's own and those of catalogues from outside.\n\n"
        "Exit status 2 where a catalogue cannot be used.",
        ["patches list", "patches list --json patches.json"],
    )
    add_optional_json(parser)
    options = parser.read(arguments)
    selection = select(load_catalogue())
    rows = [(one.id, one.gate, one.target, str(one.versions), one.title) for one in selection.chosen]
    if options.json is not None:
        keys = ("id", "gate", "target", "versions", "title")
        write_json({"format": 1, "features": as_objects(keys, rows)}, options.json)
    if options.json != STANDARD_OUTPUT:
        print_rows(("feature", "gate", "of", "versions", "what"), rows)
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
