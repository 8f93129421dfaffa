# SPDX-License-Identifier: Apache-2.0
"""Features of catalogues made from somebody's change, for many versions at once.

Text in, text out, besides the folders that are named: `_change` reads a diff, `_carry` makes it to a version's text and
`_several` to those of many, `_hunks` finds which hunks serve which versions, `_folder` writes a feature, `_worktree`
lets people make the change where the diff does not fit, and `_lint` looks a catalogue over. docs/your-own-patches.md
shows the commands.
"""

from ._carry import Carried, Edited, Outcome, Rejected, carry
from ._change import Change, LeftOut, Step, blob_name, read_change
from ._errors import ChangeError, FeatureFolderError, WorkTreeError
from ._folder import About, check_catalogue, create, extend, new_folder, read_catalogue, read_feature, slug
from ._hunks import Written, render, written
from ._line import ranges
from ._lint import Finding, check_form, check_on, paths_of
from ._several import carry_again, carry_all
from ._worktree import NOTE, REJECTED, WorkTree, change_of, open_tree, read_tree, refuse_overtaken, told

__all__ = [
    "NOTE",
    "REJECTED",
    "About",
    "Carried",
    "Change",
    "ChangeError",
    "Edited",
    "FeatureFolderError",
    "Finding",
    "LeftOut",
    "Outcome",
    "Rejected",
    "Step",
    "WorkTree",
    "WorkTreeError",
    "Written",
    "blob_name",
    "carry",
    "carry_again",
    "carry_all",
    "change_of",
    "check_catalogue",
    "check_form",
    "check_on",
    "create",
    "extend",
    "new_folder",
    "open_tree",
    "paths_of",
    "ranges",
    "read_catalogue",
    "read_change",
    "read_feature",
    "read_tree",
    "refuse_overtaken",
    "render",
    "slug",
    "told",
    "written",
]
