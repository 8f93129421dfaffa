# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches`: list and show what the plugin changes in vLLM."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from vllm_hwplugin.cli.output import STANDARD_OUTPUT, add_optional_json, as_objects, print_rows, write_json
from vllm_hwplugin.cli.parser import FAILURE, Command, Parser
from vllm_hwplugin.patching import load_catalogue

from .catalogues import all_features, condition_of, find_feature, say_troubles, select

_HERE = "vllm_hwplugin_workshop.cli"
COMMANDS = {
    "list": Command(__name__, "list_", "List the features, their switches and versions (the default)."),
    "show": Command(__name__, "show", "Show what a feature changes and why, and when it is removed."),
    "diff": Command(f"{_HERE}.patches_diff", "diff", "Print a feature's diff for one vLLM."),
    "import": Command(f"{_HERE}.patches_import", "import_change", "Make a feature from a diff, for many versions."),
    "edit": Command(f"{_HERE}.patches_edit", "edit", "Check out one vLLM with a feature applied."),
    "save": Command(f"{_HERE}.patches_edit", "save", "Save the edits of that checkout in the feature."),
    "carry": Command(f"{_HERE}.patches_carry", "carry", "Carry a catalogue to a new vLLM release."),
    "check": Command(f"{_HERE}.patches_check", "check", "Check catalogues against every vLLM version."),
}


def patches(arguments: Sequence[str]) -> int:
    """List the features, or run a subcommand."""
    parser = Parser(
        "patches",
        "List, show, make, edit and check patches.\n\n"
        "Without a command: list the features of the plugin and of installed catalogues, "
        "with their switches and versions. Exit status 2: a catalogue cannot be used.",
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
        "List the features of the plugin and of installed catalogues.\n\nExit status 2: a catalogue cannot be used.",
        ["patches list", "patches list --json patches.json"],
    )
    add_optional_json(parser)
    options = parser.read(arguments)
    selection = select(load_catalogue())
    rows = [
        (feature.id, feature.gate, feature.target, str(feature.versions), feature.title) for feature in selection.chosen
    ]
    if options.json is not None:
        keys = ("id", "gate", "target", "versions", "title")
        write_json({"format": 1, "features": as_objects(keys, rows)}, options.json)
    if options.json != STANDARD_OUTPUT:
        print_rows(("feature", "switch", "package", "versions", "what it does"), rows)
    say_troubles(selection)
    return FAILURE if selection.troubles else 0


def show(arguments: Sequence[str]) -> int:
    """Show a feature's change, its reason, its origin and its removal."""
    parser = Parser(
        "patches show",
        "Show what a feature changes and why, its origin, and when it is removed.",
        ["patches show draft-full-graph", "patches show v2-step-inputs"],
    )
    parser.add_argument("feature", metavar="FEATURE", help="The feature's id, as `patches` lists it.")
    feature = find_feature(all_features(), parser.read(arguments).feature)
    print(f"{feature.id}: {feature.title}\n")
    print(textwrap.fill(" ".join(feature.what.split()), width=100) + "\n")
    print(f"switch:   {feature.gate}")
    print(f"origin:   {feature.origin}")
    print(f"requires: {', '.join(feature.requires) or 'nothing'}")
    print(f"removal:  {' '.join(feature.removal.split())}")
    if condition := condition_of(feature):
        print(f"only:     {condition}")
    for gap in feature.not_needed:
        print(f"not needed on {feature.target} {gap.versions}: {' '.join(gap.reason.split())}")
    print(f"\non {feature.target} {feature.versions}:")
    for file in feature.files:
        print(f"  {file.path}: {len(file.hunks)} hunk{'' if len(file.hunks) == 1 else 's'} ({file.origin})")
        for text, count in Counter(str(hunk.versions) for hunk in file.hunks if hunk.versions is not None).items():
            print(f"    {count} of them on {text}")
    return 0
