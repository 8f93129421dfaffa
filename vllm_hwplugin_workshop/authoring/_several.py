# SPDX-License-Identifier: Apache-2.0
"""One change on several versions: what is certain on one of them may settle another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from packaging.version import Version

from vllm_hwplugin.patching import Source

from ._carry import Carried, Outcome, carry
from ._change import Change, Step
from ._hunks import make_diff

# On the older and on the newer side.
_TRIED: Final = 2


def carry_all(change: Change, sources: Sequence[Source], *, hints: bool = True) -> list[Carried]:
    """The change on each version, in the order of `sources`.

    Where it fits in several places, and where a commit of a series does not fit by itself, it is tried once more as it
    looks on the nearest versions that it applies to: in one diff a file, with context that means one place of both.
    A version that comes after one that has the change has most likely got it in another form, or was rid of it: where
    it would fit there, it is refused for a person to look, unless the diff names that very text.

    Args:
        hints: as for `carry`.

    Raises:
        HwpluginError: a source cannot be read.
    """
    found = [carry(change, source, hints=hints) for source in sources]
    by_age = sorted(range(len(found)), key=lambda index: Version(found[index].version))
    good = [place for place, index in enumerate(by_age) if found[index].outcome is Outcome.APPLIES]
    for place, index in enumerate(by_age):
        if _is_open(change, found[index]):
            near = sorted(good, key=lambda other: abs(other - place))[:_TRIED]
            for base in (found[by_age[other]] for other in near):
                again = _again(change, base, found[index], sources[index])
                if again.outcome is not Outcome.CONFLICT:
                    found[index] = again
                    break
    since = next((found[index].version for index in by_age if found[index].outcome is Outcome.UPSTREAM), None)
    return found if since is None else [_not_after(item, since) for item in found]


def _not_after(item: Carried, since: str) -> Carried:
    if item.outcome is not Outcome.APPLIES or Version(item.version) < Version(since) or item.is_verified:
        return item
    reason = (
        f"it would fit, but vLLM {since} has the change already: look what became of it since; if it is still needed, "
        "`patches edit` and `save` make it"
    )
    return item._replace(outcome=Outcome.CONFLICT, reason=reason)


def _is_open(change: Change, refused: Carried) -> bool:
    """Whether another diff of the same change may say more than the one that was refused."""
    if refused.outcome is not Outcome.CONFLICT or len(refused.files) != len(change.paths):
        return False
    series = len(change.steps) > len(change.paths)
    return series or any(item.verdict.status == "ambiguous" for item in refused.rejected)


def _again(change: Change, base: Carried, refused: Carried, source: Source) -> Carried:
    steps = tuple(
        Step(make_diff(path, edited, [refused.files[path].pristine]))
        for path, edited in base.files.items()
        if edited.edits
    )
    return carry(change._replace(steps=steps), source, hints=False)


def carry_again(made: Carried, sources: Sequence[Source]) -> list[Carried]:
    """What was made on one version, on each of others.

    Raises:
        HwpluginError: a source cannot be read.
    """
    steps = tuple(Step(make_diff(path, edited)) for path, edited in made.files.items() if edited.edits)
    return carry_all(Change("", made.label, "", steps), sources)
