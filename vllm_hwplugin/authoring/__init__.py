# SPDX-License-Identifier: Apache-2.0
"""Features of catalogues made from somebody's change, for many versions at once.

Text in, text out, besides the folders that are named: `_change` reads a diff, `_carry` makes it to a version's text,
`_variants` finds one diff for several versions, `_folder` writes a feature, `_worktree` lets people make the change
where the diff does not fit, and `_lint` looks a catalogue over. docs/patches-import.md shows the commands.
"""

from ._carry import Carried, Edited, Outcome, Rejected, carry
from ._change import Change, LeftOut, Step, blob_name, read_change
from ._errors import ChangeError, FeatureFolderError, WorkTreeError
from ._variants import MadeVariant, carry_all, make_variants, ranges, render

__all__ = [
    "Carried",
    "Change",
    "ChangeError",
    "Edited",
    "FeatureFolderError",
    "LeftOut",
    "MadeVariant",
    "Outcome",
    "Rejected",
    "Step",
    "WorkTreeError",
    "blob_name",
    "carry",
    "carry_all",
    "make_variants",
    "ranges",
    "read_change",
    "render",
]
