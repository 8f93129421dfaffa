# SPDX-License-Identifier: Apache-2.0
"""A trial on a stand-in of a backend."""

from __future__ import annotations

import math
import re

import pytest

torch = pytest.importorskip("torch")

from vllm_hwplugin_lab.probe import Plain, trials  # noqa: E402
from vllm_hwplugin_lab.probe._trial import Refused, refusals, try_out  # noqa: E402
from vllm_hwplugin_lab.probe.reference import Measure  # noqa: E402

TRIAL = next(one for one in trials() if one.capability == "sinks")


class Host:
    plain = Plain("bfloat16", 64, 16)

    def __init__(self, *answers, broken=False):
        self.answers, self.broken = list(answers), broken

    def declared(self, trial, case):
        assert case.sinks
        return "no"

    def run(self, case):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Measure(answer, 0.1 * answer, 0.1, 2)

    def check(self):
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def tried(*answers, trial=TRIAL, factor=2.0, **options):
    began = []
    found = try_out(
        Host(*answers, **options),
        trial,
        seed=1,
        count=len(answers),
        factor=factor,
        on_case=lambda case, declared: began.append(str(case)),
    )
    assert len(began) == len(answers) == found["cases"]
    return found, began


def test_all_within_the_factor_tells_of_the_worst():
    found, shapes = tried(0.9, 1.8, 1.1)
    assert found["behaviour"] == "works"
    assert found["ratio"] == 1.8
    assert found["shape"] == shapes[1]
    assert found["declared"] == "no"


def test_one_beyond_the_factor_is_wrong_and_its_shape_is_told():
    found, shapes = tried(0.9, 2.1, math.inf, 1.0)
    assert found["behaviour"] == "wrong"
    assert found["shape"] == shapes[2]
    assert tried(2.1, factor=3.0)[0]["behaviour"] == "works"


def test_float32_gets_twice_the_factor():
    float32 = next(one for one in trials() if one.key == ("dtype", "float32"))
    host = Host(3.9)
    host.declared = lambda trial, case: "yes"
    found = try_out(host, float32, seed=1, count=1, factor=2.0, on_case=lambda case, declared: None)
    assert found["behaviour"] == "works"
    assert tried(3.9)[0]["behaviour"] == "wrong"


def test_a_refusal_is_told_in_the_backends_words_on_one_line():
    with pytest.raises(Refused) as refused, refusals():
        raise NotImplementedError("no sinks\n  here")
    found, shapes = tried(1.0, refused.value, 1.0)
    assert found["behaviour"] == "refuses"
    assert found["detail"] == "NotImplementedError: no sinks here"
    assert found["shape"] == shapes[1]


def test_the_worst_case_counts():
    assert tried(Refused("no"), 9.0)[0]["behaviour"] == "wrong"
    assert tried(TypeError("no"), 9.0, Refused("no"))[0]["behaviour"] == "error"
    assert tried(1.0, Refused("no"), 1.0)[0]["behaviour"] == "refuses"


@pytest.mark.parametrize("error", [Refused("no"), RuntimeError("something failed")])
def test_a_broken_device_ends_the_process_and_is_no_refusal(error):
    with pytest.raises(RuntimeError, match="illegal memory"):
        tried(error, broken=True)


@pytest.mark.parametrize("error", [TypeError("no such\nargument"), ValueError("no"), ImportError("no module")])
def test_an_exception_that_is_no_refusal_is_an_error_and_tells_where_it_was_raised(error):
    """Also one of a type that refusals have: only what a backend was called for may be its no."""
    found, shapes = tried(1.0, error, 9.0)
    assert found["behaviour"] == "error"
    assert found["shape"] == shapes[1]
    text = " ".join(str(error).split())
    assert re.fullmatch(rf"{type(error).__name__}: {text} \(test_trial\.py:\d+ in run\)", found["detail"])


@pytest.mark.parametrize("kind", [NotImplementedError, ValueError, AssertionError, RuntimeError])
def test_what_a_backend_says_no_with(kind):
    with pytest.raises(Refused, match=f"{kind.__name__}: because"), refusals():
        raise kind("because")


@pytest.mark.parametrize("kind", [TypeError, KeyError, AttributeError, IndexError, ImportError, torch.OutOfMemoryError])
def test_what_is_no_refusal_stays_what_it_is(kind):
    with pytest.raises(kind) as raised, refusals():
        raise kind("because")
    assert type(raised.value) is kind


def test_a_shape_that_triton_cannot_compile_is_a_refusal():
    kind = type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})
    with pytest.raises(Refused, match="CompilationError: arange"), refusals():
        raise kind("arange")
