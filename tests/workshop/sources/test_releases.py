"""Which wheel stands for a version."""

from __future__ import annotations

import pytest

from vllm_hwplugin_workshop.sources import SourceError
from vllm_hwplugin_workshop.sources._index import Release, choose, parse_release


def releases(*filenames: str, yanked: tuple[str, ...] = ()) -> list[Release]:
    return [found for name in filenames if (found := parse_release(name, yanked=name in yanked)) is not None]


def test_newest_build_counts() -> None:
    """vLLM 0.20.1-1 and 0.23.0-2 exist beside builds without a tag, and 0.20.1-1 differs in Python text."""
    files = releases(
        "vllm-0.20.1-cp38-abi3-manylinux_2_35_x86_64.whl",
        "vllm-0.20.1-2-cp38-abi3-manylinux_2_35_x86_64.whl",
        "vllm-0.20.1-10-cp38-abi3-manylinux_2_35_x86_64.whl",
        "vllm-0.20.2-cp38-abi3-manylinux_2_35_x86_64.whl",
    )
    assert choose("vllm", "0.20.1", files).build == (10, "")


def test_choice_does_not_depend_on_the_order() -> None:
    files = releases(
        "vllm-0.33.0-cp38-abi3-manylinux_2_28_aarch64.whl",
        "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl",
        "vllm-0.33.0-cp38-abi3-macosx_11_0_arm64.whl",
    )
    assert {choose("vllm", "0.33.0", order).filename for order in (files, files[::-1])} == {
        "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    }


def test_newest_build_outweighs_the_platform() -> None:
    files = releases(
        "vllm-0.33.0-1-cp38-abi3-manylinux_2_28_aarch64.whl", "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    )
    assert choose("vllm", "0.33.0", files).build == (1, "")


def test_local_versions() -> None:
    """A plain version finds local builds, as pip does; a local version finds only itself."""
    files = releases("vllm-0.33.0+cu128-py3-none-any.whl", "vllm-0.33.0+cu129-py3-none-any.whl")
    assert str(choose("vllm", "0.33.0", files).version) == "0.33.0+cu129"
    assert str(choose("vllm", "0.33.0+cu128", files).version) == "0.33.0+cu128"
    with pytest.raises(SourceError):
        choose("vllm", "0.33.0+cpu", files)


def test_pre_releases_are_found_by_name_only() -> None:
    files = releases(
        "vllm-0.34.0rc1-py3-none-any.whl", "vllm-0.34.0.dev5+g123-py3-none-any.whl", "vllm-0.33.0-py3-none-any.whl"
    )
    assert str(choose("vllm", "0.34.0rc1", files).version) == "0.34.0rc1"
    assert str(choose("vllm", "0.34.0.dev5", files).version) == "0.34.0.dev5+g123"
    with pytest.raises(SourceError, match=r"the nearest are 0\.34\.0\.dev5\+g123, 0\.34\.0rc1$"):
        choose("vllm", "0.34.0", files)


def test_yanked_only_when_there_is_nothing_else() -> None:
    names = ("vllm-0.33.0-1-py3-none-any.whl", "vllm-0.33.0-py3-none-any.whl")
    assert choose("vllm", "0.33.0", releases(*names, yanked=names[:1])).filename == names[1]
    assert choose("vllm", "0.33.0", releases(*names, yanked=names)).filename == names[0]


def test_no_wheel_at_all() -> None:
    with pytest.raises(SourceError, match=r"lists no wheel of vllm; .*or name a wheel file or a folder"):
        choose("vllm", "0.33.0", releases("vllm-0.33.0.tar.gz"))
