"""What a child's answer says of each cell, and what is left for the next child."""

from __future__ import annotations

from vllm_hwplugin_lab.bench.micro import _cells

TODO = (("a", "1"), ("b", "1"), ("a", "2"), ("b", "2"))


def begin(kernel, case):
    return {"event": "begin", "kernel": kernel, "case": case}


def cell(kernel, case, status=_cells.MEASURED):
    return {"event": "cell", "outcome": _cells.outcome((kernel, case), status)}


def statuses(progress):
    return {(o["kernel"], o["case"]): (o["status"], o["reason"]) for o in progress.outcomes}


def test_a_whole_answer_leaves_nothing():
    events = [e for kernel, case in TODO for e in (begin(kernel, case), cell(kernel, case))]
    progress = _cells.after(TODO, events, None)
    assert progress.todo == ()
    assert set(statuses(progress).values()) == {(_cells.MEASURED, None)}


def test_the_cell_that_was_begun_is_the_one_that_crashed_and_the_others_are_left():
    progress = _cells.after(TODO, [begin(*TODO[0]), cell(*TODO[0]), begin(*TODO[1])], "killed by SIGSEGV")
    assert statuses(progress) == {TODO[0]: (_cells.MEASURED, None), TODO[1]: (_cells.CRASHED, "killed by SIGSEGV")}
    assert progress.todo == TODO[2:]


def test_a_device_that_is_not_usable_says_what_broke_it():
    events = [begin(*TODO[0]), {"event": "broken", "reason": "illegal memory access"}]
    progress = _cells.after(TODO, events, "exit code 1")
    assert statuses(progress) == {
        TODO[0]: (_cells.CRASHED, "the device was not usable after it: illegal memory access")
    }
    assert progress.todo == TODO[1:]


def test_a_kernel_that_ended_two_processes_is_not_tried_again():
    progress = _cells.after(TODO, [begin(*TODO[0])], "killed by SIGSEGV", crashes=["a"])
    assert statuses(progress)["a", "2"] == (_cells.NOT_RUN, "not tried again: a ended 2 processes")
    assert progress.todo == (("b", "1"), ("b", "2"))
    assert _cells.after(TODO, [begin(*TODO[0])], "killed by SIGSEGV", crashes=["b"]).todo == TODO[1:]


def test_a_process_that_ends_between_cells_is_not_followed_by_another():
    progress = _cells.after(TODO, [begin(*TODO[0]), cell(*TODO[0])], "exit code 1")
    assert progress.todo == ()
    assert statuses(progress)["b", "2"] == (_cells.NOT_RUN, "the process ended before it: exit code 1")


def test_cells_that_a_child_forgot_are_not_run():
    progress = _cells.after(TODO, [cell(*TODO[0])], None)
    assert progress.todo == ()
    assert statuses(progress)["a", "2"][0] == _cells.NOT_RUN
