# SPDX-License-Identifier: Apache-2.0
"""Make features of catalogues from a change, for many versions.

`_change` reads diffs, `_carry` applies one to the texts of versions, `_series` several one after another, `_hunks`
finds the hunks for each version, `_folder` writes a feature, and `_worktree` lets a person make the change if the diff
does not fit. `_release` carries a catalogue to a new release. docs/your-own-patches.md shows the commands.
"""

from ._carry import Carried, Outcome, Rejected, carry, carry_all
from ._change import Change, ChangeError, Step, blob_name, merged, read_change, read_series, settled
from ._folder import About, check_catalogue, create, extend, new_folder, put_back, read_catalogue, read_feature, slug
from ._hunks import Written, carry_again, render, written
from ._line import ranges
from ._release import add_texts, carry_catalogue, read_texts, relied_texts, write_texts
from ._series import carry_series
from ._worktree import REJECTED, change_of, open_tree, read_tree, told, where_it_stands
