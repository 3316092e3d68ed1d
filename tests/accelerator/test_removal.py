"""Each call that orders streams or keeps memory is needed: without it a test fails.

`removal.sites` finds the calls. `NOTICED_BY` says for each what notices its loss, so
that this takes a second or so. A call that is in no table is tried against everything
that there is. If nothing notices its loss, either it is not needed and goes, or a
scenario is missing, or the simulated device cannot show why it is needed: then it is
listed in `NOT_TRIED`, with the reason.

All trials are tests elsewhere, too, or scenarios of `test_features`, so that none of
them fails for another reason than the loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from minidp import DataParallel, native
from minidp.native import binary
from tests.accelerator import (
    removal,
    scenarios,
    test_audit_order,
    test_lifetimes,
    test_logical_ranks,
    test_sharded_step,
    test_waits,
)
from tests.accelerator.training import (
    Run,
    Scenario,
    result_of,
)
from tests.support import sim
from tests.support.pool import RankError

Trial = Callable[[Any], object]  # a function of a rank, which raises if it notices

# Calls that are left out, by how their names begin.
NOT_TRIED = {
    "accelerator.py _has_record_stream": "asks only whether there is such an operator",
    "comm/collectives.py GatheredSum.": "sparse tensors are not simulated",
    "core/sparse_bucket.py": "sparse tensors are not simulated",
    "comm/collectives.py barrier wait_for (2)": "groups written in Python, on the CPU",
    "comm/collectives.py GatheredExchange.": "groups written in Python, on the CPU",
    "comm/work.py PythonWork.": "groups written in Python, on the CPU",
    "comm/work.py FutureWork.is_done_within": "a wait of the host, with a limit",
    "comm/work.py in_time": "the connection of a group, for which the host waits",
    "comm/communicator.py Communicator.wait work.wait": "waits of the CPU's groups",
    "comm/communicator.py Communicator._wait_long": "waits of the CPU's groups",
    "comm/communicator.py InFlight.ask_the_device": "an aborted group: test_faults",
    "comm/communicator.py Communicator._wait_on_device work.wait": "(1): a capture",
    "comm/work.py is_done_within": "waits of the CPU's groups",
    "comm/work.py BothWays.": "all-to-alls of the CPU's groups",
    "data_parallel/agree_on_group.py agree_and_reset each.let_finish": "test_faults",
    "data_parallel/join.py announce wait_for_message": "nobody reads that sum",
    "doctor/": "a command that waits to measure the device's times",
    "guard/comparison.py": "messages of the store",
    "hang/": "threads and messages of the host",
    "logical/averaging.py HostSum.": "the CPU's sums",
    "logical/averaging.py WaitedSum.": "the CPU's sums, of groups written in Python",
    "comm/collectives.py GatheredParts.": "groups written in Python",
    "sharded/averaging.py _take": "Gloo on a device is not simulated",
    "sharded/checkpoint.py": "a message of the hosts",
    "sharded/pieces.py": "messages of Gloo",
    "sharded/split_bucket.py SplitBucket._wait_for_readers": "shared memory of the CPU",
    "sharded/step.py ShardedStep._wait_for_readers": "shared memory of the CPU",
    "sync_batchnorm.py": "layers on a device are torch's own",
    "torchft/quorum.py": "tests/torchft/test_on_a_device.py",
}

# What a loss shows as: a race, other bits or other times, which a trial asserts; or an
# error with one of these texts, by which minidp or torch refuses what it finds then.
SIGNS = {
    "AssertionError": ("",),
    "CommHookError": ("returned a future whose value is no tensor",),
    "InternalError": ("IN_FLIGHT -> FILLING is not allowed",),
    "ItemCountError": ("added to averages", "too large or NaN"),
    "LogicalRankError": ("The audit of step",),
    "RuntimeError": ("Both events must be completed",),
    "ValueError": ("cannot convert float NaN", "Both events must be recorded"),
}

# What only hooks of C++ call, and what only those of Python do.
OF_EXTENSION = {
    "core/grad_hooks.py PendingGrads.mark_bucket_ready self.written_on[number].update"
}
OF_PYTHON = {
    "core/grad_hooks.py _noting_stream.grad_hook written_on[bucket_of[i]].add",
    "core/dense_bucket.py DenseBucket.copy_now self._made.hold_back",
}


def trains(ctx: Any, scenario: Scenario, way: str) -> None:
    """Notice other bits than those of the CPU, and races."""
    expected = result_of(Run(ctx, DataParallel, "cpu"), scenario)
    found = result_of(Run(ctx, DataParallel, "sim", way), scenario)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


def training(scenario: Scenario, way: str = "default") -> Trial:
    return partial(trains, scenario=scenario, way=way)


def options(name: str, way: str = "default") -> Trial:
    return training(partial(scenarios.with_options, name=name), way)


def body(function: Any, **parameters: object) -> Trial:
    """Return the body of a test on ranks."""
    return partial(function.on_rank, **parameters)


AUDIT, LIVES, WAITS = test_audit_order, test_lifetimes, test_waits
LOGICAL, SHARDED = test_logical_ranks, test_sharded_step
DEFAULT = options("default")
WRITTEN_ON = body(
    AUDIT.test_nodes_of_several_streams_write_one_bucket, views=False, keeps_grads=True
)
PAUSED = body(AUDIT.test_a_paused_backward_copies_on_a_stream_that_the_bucket_waits_for)
TIMES = body(AUDIT.test_a_recording_has_the_times_of_the_device)
LOOKED_AT = body(WAITS.test_averages_are_looked_at_on_the_stream_of_an_output)
FILLED = body(
    WAITS.test_a_bucket_is_launched_from_the_stream_that_has_filled_it, options={}
)
FINITE = body(
    WAITS.test_a_bucket_is_launched_from_the_stream_that_has_filled_it,
    options={"check_finite_grads": True},
)
MESSAGES = body(WAITS.test_small_messages_are_read_behind_their_collectives)
HOOK_IS_LATE = body(WAITS.test_what_a_hook_has_queued_is_late_until_it_has_ended)
ASIDE = body(WAITS.test_the_watchdog_holds_up_no_stream_of_the_user)
LETS_GO = body(WAITS.test_who_has_waited_lets_go_of_the_tensors)
ONE_AT_A_TIME = body(
    WAITS.test_a_hook_that_runs_one_at_a_time_has_ended_when_it_returns
)
DROPPED = body(LIVES.test_gradients_of_another_stream_are_dropped_by_the_user)
BECOME_VIEWS = body(LIVES.test_gradients_of_another_stream_become_views, size=500)
BY_EXTENSION = [
    body(LIVES.test_a_bucket_that_the_extension_fills_dies_before_it_is_full),
    *(
        body(
            LIVES.test_the_extension_makes_views_of_gradients_of_another_stream,
            size=size,
        )
        for size in (500, 20_000)
    ),
]
DIES = body(
    LIVES.test_a_wrapper_that_dies_after_its_backward,
    views=False,
    items=False,
    unused=False,
)
DIES_WITH_ITEMS = body(
    LIVES.test_a_wrapper_that_dies_after_its_backward,
    views=False,
    items=True,
    unused=False,
)
FP32 = body(
    AUDIT.test_a_comm_hook_keeps_what_its_collectives_read, name="fp32_accumulate_hook"
)
RAISED = training(scenarios.raised_and_reset, "mixed_nodes")
MAPS = body(AUDIT.test_maps_live_until_they_are_read, skips=False)
COUNTS = body(AUDIT.test_counts_live_until_they_are_sent, keeps_grads=False)
OTHER_STREAM = body(AUDIT.test_items_that_are_counted_on_another_stream)

DIVIDED = training(test_sharded_step.SCENARIOS["sgd"])
SUMS = training(scenarios.logical_ranks_with_several_sums)
AUDITS = training(scenarios.audited_logical_ranks)

# Calls of C++ that order streams or keep memory.
ORDERS_IN_CPP = re.compile(
    r"\b(record_?stream|recordDataPtr\w*|block|wait_?stream|wait_?event|synchronize)\("
    r"|\bEvent\b",
    re.IGNORECASE,
)

# By file, and then by function and call.
_NOTICED_BY: Mapping[str, Mapping[str, Trial]] = {
    "accelerator.py": {
        "synchronize torch.accelerator.synchronize": TIMES,
        "use_here _record": BECOME_VIEWS,
        "_record memory.record_stream": BECOME_VIEWS,
        "HomeStreams.add_to bucket.written_on.add": training(
            scenarios.unused_on_another_device, "run_aside"
        ),
        "HomeStreams.follow current.wait_stream": training(
            scenarios.items_on_two_devices, "run_aside"
        ),
        "BucketStreams.use_buffer use_here": DIES,
        "BucketStreams.gather current.wait_stream": WRITTEN_ON,
        "BucketStreams.dropping current.wait_stream": RAISED,
        "BucketStreams.gather _record": DROPPED,
        "After.__init__ self._event.record": LOOKED_AT,
        "After.hold_back current_stream(self._device).wait_event": LOOKED_AT,
        "After.wait self._event.synchronize": MESSAGES,
        "Timer.__init__ self._origin.synchronize": body(
            WAITS.test_a_timer_begins_when_the_device_is_there
        ),
        "Timer.mark event.record": TIMES,
        "Timer.settle synchronize": TIMES,
        "Download.wait self._end.wait": MESSAGES,
    },
    "comm/collectives.py": {
        "gather_rows wait_for_message": MESSAGES,
        "wait_for_message wait_for": MESSAGES,
        "barrier wait_for": body(WAITS.test_a_barrier_lets_the_host_wait_for_all_ranks),
        "broadcast_integers wait_for_message": MESSAGES,
        "_unpack wait_for_message": MESSAGES,
    },
    "comm/communicator.py": {
        "InFlight.is_over accelerator.on_side_stream": ASIDE,
        "InFlight.is_over self.work.future.wait": ASIDE,
        "InFlight.is_over self.waited_for": HOOK_IS_LATE,
        "Communicator._wait_on_device launched.waited_for": LETS_GO,
        "Communicator.find_late_on_device accelerator.selected": body(
            WAITS.test_the_watchdog_asks_on_the_device_that_it_means
        ),
        "Communicator._wait_on_device work.wait (2)": body(
            WAITS.test_who_waits_for_a_collective_is_behind_it
        ),
    },
    "comm/work.py": {
        "FutureWork.wait self.future.wait": ONE_AT_A_TIME,
    },
    "comm_hooks.py": {
        "_in_dtype.compressed.decompress use_here": body(
            LIVES.test_a_wrapper_dies_before_its_hook_has_ended,
            name="fp16_compress_hook",
            views=False,
        ),
        "int8_error_feedback_hook.decode use_here": body(
            LIVES.test_a_wrapper_dies_before_its_hook_has_ended,
            name="int8_error_feedback_hook",
            views=False,
        ),
        "_Exchange.finish wait_for": FP32,
        "_Exchange.finish use_here": FP32,
        "one_at_a_time.waiting wait_for": ONE_AT_A_TIME,
    },
    "core/bucket.py": {
        "Bucket.flatten self.streams.gather": WRITTEN_ON,
        "Bucket.launch self.on_stream": FILLED,
        "Bucket.wait self.communicator.wait": DEFAULT,
    },
    "core/bucket_queue.py": {
        "BucketQueue._launch bucket.on_stream": FINITE,
        "BucketQueue.finish comm.wait_for": body(
            WAITS.test_a_backward_ends_after_what_a_buffer_hook_owes
        ),
        "BucketQueue._finish bucket.wait": DEFAULT,
        "BucketQueue.drain bucket.wait": body(
            WAITS.test_a_reset_waits_for_what_a_paused_backward_has_launched
        ),
    },
    "core/dense_bucket.py": {
        "DenseBucket.copy_now self._made.hold_back": body(
            AUDIT.test_lazy_buckets_of_other_streams, views=True
        ),
        "DenseBucket._allocate self.streams.made_buffer": body(
            AUDIT.test_lazy_buckets_of_other_streams, views=False
        ),
        "DenseBucket.copy_in self.streams.use_buffer": body(
            LIVES.test_a_wrapper_that_dies_with_a_bucket_that_was_not_launched
        ),
        "DenseBucket.copy_now self.streams.use_buffer": body(
            LIVES.test_a_wrapper_that_dies_with_a_bucket_that_is_not_full, views=True
        ),
        "DenseBucket.copy_now accelerator.use_here": body(
            LIVES.test_gradients_of_another_stream_become_views, size=20_000
        ),
        "DenseBucket.write_averages self.streams.use_buffer": DIES,
        "DenseBucket.write_averages accelerator.use_here": body(
            LIVES.test_averages_of_unused_parameters_are_put_back
        ),
        "DenseBucket._point_at_views accelerator.use_here": BECOME_VIEWS,
        "DenseBucket._move_to_views accelerator.use_here": body(
            LIVES.test_gradients_of_another_stream_become_views_of_a_new_wrapper
        ),
    },
    "core/exchange.py": {
        "Exchange.settle self._communicator.wait": MAPS,
        "Exchange.settle use_here": body(LIVES.test_a_sum_that_nobody_reads),
    },
    "core/grad_hooks.py": {
        "_noting_stream.grad_hook written_on[bucket_of[i]].add": WRITTEN_ON,
        "PendingGrads.pause self.written_on[self.bucket_of[i]].add": PAUSED,
        "PendingGrads.pause use_here": body(
            LIVES.test_gradients_of_another_stream_are_copied_in_a_pause, views=False
        ),
        "PendingGrads.mark_bucket_ready self.written_on[number].update": WRITTEN_ON,
    },
    "core/item_counts.py": {
        "_Step.note_average.wait looked.hold_back": LOOKED_AT,
        "ItemCounts.add map": OTHER_STREAM,
        "ItemCounts.totals use_here": body(
            LIVES.test_totals_of_items_are_read_on_another_stream
        ),
        "_are_zero use_here": body(LIVES.test_a_loss_that_is_weighed_on_another_stream),
        "ItemCounts._write moment.wait": body(
            AUDIT.test_a_count_on_the_device_of_a_module_on_the_cpu
        ),
        "ItemCounts._write_on_device moment.hold_back": OTHER_STREAM,
        "ItemCounts._write_on_device use_here": COUNTS,
        "ItemCounts.finishing on_side_stream": body(
            WAITS.test_counts_travel_to_the_host_on_a_stream_of_their_own
        ),
        "ItemCounts.finishing arrived.hold_back": training(scenarios.items),
        "ItemCounts.finishing use_here": DIES_WITH_ITEMS,
    },
    "data_parallel/join.py": {
        "_LimitedJoin._get_num_nonjoined_procs wait_for_message": body(
            WAITS.test_join_reads_the_device_once_in_a_forward_if_its_group_has_no_other
        ),
    },
    "logical/audit.py": {
        "Audit._add_up_again comm.wait_for_message": AUDITS,
    },
    "logical/averaging.py": {
        "StreamSum.__init__ accelerator.on_side_stream": body(
            LOGICAL.test_the_stream_of_a_backward_does_not_wait_for_other_ranks
        ),
        "StreamSum.__init__ filled.hold_back": SUMS,
        "StreamSum.__init__ accelerator.use_here": SUMS,
        "StreamSum.__init__ work.wait": SUMS,
        "StreamSum.__init__ last.wait": SUMS,
        "StreamSum.wait self._end.hold_back": SUMS,
    },
    "logical/partial_sums.py": {
        "PartialSums.add use_here": body(
            LOGICAL.test_gradients_of_another_stream_are_added_up
        ),
        "PartialSums._of self._made[plan.device].hold_back": body(
            LOGICAL.test_a_bucket_of_another_stream_waits_for_the_sums
        ),
        "PartialSums._of use_here": body(
            LOGICAL.test_sums_are_dropped_while_a_bucket_of_another_stream_reads_them
        ),
    },
    "sharded/averaging.py": {
        "StreamedShare.__init__ accelerator.on_side_stream": body(
            SHARDED.test_the_stream_of_a_backward_does_not_wait_for_other_ranks
        ),
        "StreamedShare.__init__ filled.hold_back": DIVIDED,
        "StreamedShare.__init__ accelerator.use_here": body(
            SHARDED.test_a_wrapper_that_dies_before_its_sums_have_ended
        ),
        "StreamedShare.__init__ work.wait": DIVIDED,
        "StreamedShare.get_future accelerator.on_side_stream": body(
            SHARDED.test_a_recording_has_the_time_of_a_sum
        ),
        "StreamedShare.wait self._end.hold_back": DIVIDED,
    },
    "sharded/bucket.py": {
        "ShardedBucket.write_averages accelerator.use_here": body(
            SHARDED.test_gradients_of_another_stream_are_dropped
        ),
        "ShardedBucket.room self.streams.use_buffer": body(
            SHARDED.test_a_wrapper_that_dies_after_a_step_on_another_stream
        ),
    },
    "sharded/split_bucket.py": {
        "SplitBucket._whole_grad accelerator.use_here": body(
            SHARDED.test_divided_gradients_of_another_stream_are_replaced
        ),
    },
    "sharded/returns.py": {
        "Return.finish communicator.wait": DIVIDED,
    },
    "hooks/comm_hook.py": {
        "HookInFlight.wait self.future.wait": training(scenarios.compressed),
    },
}
NOTICED_BY = {
    f"{path} {call}": trial
    for path, calls in _NOTICED_BY.items()
    for call, trial in calls.items()
}

# For a call that is in no table: first what is cheap and tries hard.
EVERYTHING: tuple[Trial, ...] = (
    *dict.fromkeys(NOTICED_BY.values()),
    *(
        training(scenario, way)
        for way in ("mixed_nodes", "run_aside", "wrapped_aside", "default")
        for scenario in (
            *(partial(scenarios.with_options, name=each) for each in scenarios.OPTIONS),
            *(*scenarios.BOTH, *scenarios.OURS),
        )
    ),
)


def is_tried(site: removal.Site) -> bool:
    is_left_out = any(str(site).startswith(each) for each in NOT_TRIED)
    return str(site) in NOTICED_BY or not is_left_out


SITES = list(filter(is_tried, removal.sites()))
ONLY_OF_EXTENSION = [site for site in SITES if str(site) in OF_EXTENSION]


def run_without(ctx: Any, site: removal.Site, number: int | None) -> None:
    """Run a trial without a call: the one of the table, or one of everything."""
    trial = NOTICED_BY[str(site)] if number is None else EVERYTHING[number]
    try:
        with removal.removed(site):
            trial(ctx)
    finally:
        sim.delay(0, seed=0)  # which a trial that fails has left


@pytest.mark.mutants
@pytest.mark.parametrize(
    "site", [site for site in SITES if site not in ONLY_OF_EXTENSION], ids=str
)
def test_the_loss_of_a_call_is_noticed(pool, site):
    if str(site) in OF_PYTHON and native.library() is not None:
        pytest.skip("hooks in C++ are in use")
    numbers = [None] if str(site) in NOTICED_BY else range(len(EVERYTHING))
    # A rank that did not answer would prove nothing. There are limits for that.
    heard: list[RankError] = []
    for number in numbers:
        heard += errors_without(pool, site, number)
        if any(map(is_sign, heard)):
            return
    pytest.fail(f"nothing noticed it; errors: {heard}")


@pytest.mark.native
@pytest.mark.mutants
@pytest.mark.usefixtures("_extension")
@pytest.mark.parametrize("site", ONLY_OF_EXTENSION, ids=str)
def test_the_loss_of_a_call_for_the_extension_is_noticed(pool, site):
    heard = errors_without(pool, site, None)
    assert any(map(is_sign, heard)), heard


def run_without_marks_of_extension(ctx: Any, number: int) -> None:
    try:
        with sim.marks_ignored(binary.EXTENSION):
            BY_EXTENSION[number](ctx)
    finally:
        sim.delay(0, seed=0)


@pytest.mark.native
@pytest.mark.mutants
@pytest.mark.usefixtures("_extension")
@pytest.mark.parametrize("number", range(len(BY_EXTENSION)))
def test_the_loss_of_a_mark_of_the_extension_is_noticed(pool, number):
    """Each program needs another one of the two."""
    results = pool.run(run_without_marks_of_extension, 2, number, errors="return")
    assert any(isinstance(result, RankError) and is_sign(result) for result in results)


def test_the_extension_has_no_other_call_of_this_kind():
    """Another one needs a program of its own that fails without it."""
    found = [
        code
        for path in binary.source_files(binary.source_folder())
        for line in path.read_text().splitlines()
        for code in [line.partition("//")[0].strip()]
        if ORDERS_IN_CPP.search(code)
    ]
    assert found == [
        "values_.record_stream(stream);",
        "grad.record_stream(current_stream(grad.device()));",
    ]


def errors_without(
    pool: Any, site: removal.Site, number: int | None
) -> list[RankError]:
    """Return the errors of the ranks that ran a trial without a call."""
    results = pool.run(run_without, 2, site, number, errors="return")
    errors = [result for result in results if isinstance(result, RankError)]
    assert not any(error.is_a("NothingRemoved") for error in errors), errors
    return errors


def devices_with_races(ctx: Any, site: removal.Site) -> list[int]:
    """Return the devices that the races of a training without a call are on."""
    try:
        with removal.removed(site):
            trains(ctx, scenarios.two_devices, "mixed_nodes")
    except AssertionError as error:
        return [index for index in range(2) if f"of device {index}" in str(error)]
    finally:
        sim.delay(0, seed=0)
    return []


@pytest.mark.mutants
def test_the_loss_of_a_wait_is_noticed_on_each_device(pool):
    name = "accelerator.py BucketStreams.gather current.wait_stream"
    (site,) = (site for site in SITES if str(site) == name)
    assert pool.run(devices_with_races, 2, site) == [[0, 1]] * 2


def is_sign(error: RankError) -> bool:
    texts = SIGNS.get(error.kind, ())
    return any(text in error.message for text in texts)


@pytest.mark.parametrize("kind", ["AttributeError", "TypeError", "Hang", "Exited"])
def test_a_trial_that_breaks_has_noticed_nothing(kind):
    """Either nobody has kept it up to date, or the call was removed in a wrong way."""
    assert not is_sign(RankError(0, (kind,), "'NoneType' object has no attribute"))


def test_the_tables_list_what_there_is():
    everything = [str(site) for site in removal.sites()]
    assert set(NOTICED_BY) <= set(everything)
    for start in NOT_TRIED:
        assert any(each.startswith(start) for each in everything), start
    assert set(NOTICED_BY) >= OF_EXTENSION | OF_PYTHON
