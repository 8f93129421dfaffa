# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches carry`: carry a catalogue to a new release, as far as that needs no judgement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_hwplugin.base.versions import SUPPORTED, supported_as
from vllm_hwplugin.cli.parser import Parser
from vllm_hwplugin.patching.texts import default_folder

from ..authoring import add_texts, carry_catalogue, read_catalogue, read_texts, write_texts
from ..sources import Index, SourceError, open_target
from ._lines import line
from ._waiting import say_notes
from .patches_import import say_put_back


def carry(arguments: Sequence[str]) -> int:
    """Carry a catalogue to a new release of vLLM."""
    parser = Parser(
        "patches carry",
        "Carry a catalogue to a new release of vLLM. Adds the release to the `versions` of patches whose hunks fit "
        "it exactly, at their lines or moved, and to the `[[not_needed]]` ranges that end at the release before it. "
        "Adds the texts that patches rely on to `texts.json`. Lists the rest, which needs a person."
        "\n\nExit status: 0 all carried, 1 work is left, 2 could not tell.",
        ["patches carry 0.34.0", "patches carry 0.34.0 --from ./vllm-0.34.0.whl"],
    )
    parser.add_argument(
        "version", metavar="VERSION", help="The release; add it to SUPPORTED in vllm_hwplugin/base/versions.py first."
    )
    parser.add_argument(
        "--from", dest="source", metavar="TARGET", help="Its text, as for `drift`. Default: the package index."
    )
    parser.add_argument(
        "--catalogue",
        metavar="FOLDER",
        type=Path,
        default=default_folder(),
        help="The catalogue to carry. Default: the plugin's own.",
    )
    options = parser.read(arguments)
    version = supported_as(options.version)
    if version is None or version == SUPPORTED[0]:
        raise SourceError(
            f"{options.version}: expected one of {SUPPORTED[1]} to {SUPPORTED[-1]}; add a new release to SUPPORTED in "
            "vllm_hwplugin/base/versions.py first"
        )
    say_put_back(options.catalogue)
    last = SUPPORTED[SUPPORTED.index(version) - 1]
    catalogue = read_catalogue(options.catalogue)
    index = Index()
    source = open_target(options.source or version, index)
    done, left = carry_catalogue(catalogue, options.catalogue, source, version)
    table = read_texts(options.catalogue)
    changed = add_texts(table, source, version)
    if changed:
        write_texts(options.catalogue, table)
    for name in done:
        line(f"{name}: for {version}")
    for path in changed:
        users = [
            feature.id
            for feature in catalogue.features
            if feature.versions.covers(last) and any(path == relied.path for relied in feature.texts)
        ]
        line(f"to read: {path}, relied on by {', '.join(users)}")
    for work in left:
        line(f"to do: {work.feature}: {work.reason}")
    say_notes(index.notes)
    return 1 if changed or left else 0
