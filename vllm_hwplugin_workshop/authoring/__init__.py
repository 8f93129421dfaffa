# SPDX-License-Identifier: Apache-2.0
"""Make features of catalogues from a change, for many versions.

`_change` reads a diff, `_carry` applies it to the texts of versions, `_hunks` finds the hunks for each version,
`_folder` writes a feature, and `_worktree` lets a person make the change if the diff does not fit. `_release` carries a
catalogue to a new release. docs/your-own-patches.md shows the commands.
"""

from ._carry import Carried, Edited, Outcome, Rejected, carry, carry_all
from ._change import Change, ChangeError, LeftOut, Step, blob_name, read_change
from ._folder import About, check_catalogue, create, extend, new_folder, put_back, read_catalogue, read_feature, slug
from ._hunks import Written, carry_again, render, written
from ._line import ranges
from ._release import ForAPerson, add_texts, carry_catalogue, read_texts, relied_texts, write_texts
from ._worktree import REJECTED, WorkTree, change_of, open_tree, read_tree, told, where_it_stands

__all__ = [
    "REJECTED",
    "About",
    "Carried",
    "Change",
    "ChangeError",
    "Edited",
    "ForAPerson",
    "LeftOut",
    "Outcome",
    "Rejected",
    "Step",
    "WorkTree",
    "Written",
    "add_texts",
    "blob_name",
    "carry",
    "carry_again",
    "carry_all",
    "carry_catalogue",
    "change_of",
    "check_catalogue",
    "create",
    "extend",
    "new_folder",
    "open_tree",
    "put_back",
    "ranges",
    "read_catalogue",
    "read_change",
    "read_feature",
    "read_texts",
    "read_tree",
    "relied_texts",
    "render",
    "slug",
    "told",
    "where_it_stands",
    "write_texts",
    "written",
]
