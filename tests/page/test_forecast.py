"""Laws: what the browser predicts and prints is what Python predicts and prints."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidp.config import MIB
from minidp.costmodel import Network, capped_groups, play
from minidp.overlap import html_page
from minidp.overlap.forecast import CAPS_MB, analyse
from minidp.overlap.page import _model
from minidp.overlap.skew import aligned
from tests.page.recordings import recordings

NOTHING = {"cap": None, "bus": None, "latency": None, "ranks": None, "half": False}
changes = st.fixed_dictionaries(
    {
        "cap": st.sampled_from([None, *CAPS_MB]),
        "bus": st.sampled_from([None, 1e6, 125e6, 1.25e9]),
        "latency": st.sampled_from([None, 0.0, 1e-5, 3e-3]),
        "ranks": st.sampled_from([None, 2, 3, 64]),
        "half": st.booleans(),
    }
)


@pytest.fixture(scope="session")
def blank(browser):
    """A page of any recording, for its functions."""
    page = browser.new_page()
    page.set_content(html_page(recordings(0, ranks=2, steps=3, buckets=2)))
    return page


def on_network(forecast, change, now):
    """The network of a change: a ring of n ranks has 2 (n - 1) hops with 1/n each."""
    ranks = change["ranks"] or now
    sent = forecast.network.bytes_per_s * 2 * (now - 1) / now
    latency = change["latency"]
    latency = forecast.network.latency_s if latency is None else latency
    hops = 2 * (ranks - 1)
    return Network(
        latency / (2 * (now - 1)) * hops, (change["bus"] or sent) * ranks / hops
    )


def predicted(forecast, change, now):
    """Seconds gained, and the schedule, as `Forecast` predicts them."""
    backward, groups = forecast.backward, forecast.groups
    if change["cap"] is not None:
        groups = capped_groups(backward, [int(change["cap"] * MIB)])
    if change["half"]:
        backward = replace(backward, nbytes=tuple(n // 2 for n in backward.nbytes))
    network = forecast.network
    if any(change[name] is not None for name in ("bus", "latency", "ranks")):
        network = on_network(forecast, change, now)
    schedule = play(backward, groups, network)
    before = play(forecast.backward, forecast.groups, forecast.network).exposed_s
    return min(before - schedule.exposed_s, forecast.exposed_s), schedule


def compare(page, forecast, model, change):
    found = page.evaluate("([m, c]) => predict(m, c)", [model, change])
    gain, schedule = predicted(forecast, change, model["ranks"])
    assert found["gain_s"] == pytest.approx(gain, rel=1e-9, abs=1e-15)
    assert found["step_s"] == pytest.approx(forecast.step_s - gain, rel=1e-9)
    buckets = [(each["start"], each["done"]) for each in found["schedule"]["buckets"]]
    assert len(buckets) == len(schedule.buckets)
    for ours, theirs in zip(buckets, schedule.buckets, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    if change == NOTHING | {"cap": change["cap"]} and change["cap"] is not None:
        groups = capped_groups(forecast.backward, [int(change["cap"] * MIB)])
        assert found["gain_s"] == forecast.gain(forecast.backward, groups)
    if change == NOTHING | {"half": True}:
        assert found["gain_s"] == forecast.gain_of_half()


def compare_best(page, forecast, model):
    found = page.evaluate("([m, c]) => bestCap(m, c)", [model, NOTHING])
    assert (found["cap"], found["gain_s"]) == forecast.best_cap()


@given(st.integers(0, 10**6), changes)
def test_any_recording(blank, seed, change):
    found = analyse(aligned(recordings(seed)))
    assert found is not None
    if found.forecast is not None:
        model = _model(found.forecast, found)
        for each in (change, NOTHING | {"half": True}, NOTHING | {"cap": 1}):
            compare(blank, found.forecast, model, each)
        compare_best(blank, found.forecast, model)


def test_numbers_are_rounded_as_python_rounds_them(blank):
    random = Random(0)
    numbers = [k / 8 for k in range(-80, 80)] + [0.35, 2.675, 1e-9, 123456.75, 0.0]
    numbers += [random.uniform(0, 1000) for _ in range(500)]
    numbers += [round(random.uniform(0, 10), 2) for _ in range(500)]
    found = blank.evaluate("n => n.map(x => [0, 1, 2].map(d => fixed(x, d)))", numbers)
    assert found == [[f"{x:.{digits}f}" for digits in (0, 1, 2)] for x in numbers]
    milliseconds = blank.evaluate("n => n.map(x => ms(x / 1e3))", numbers)
    expected = [f"{round(x / 1e3 * 1e3, 1) + 0.0:.1f}" for x in numbers]
    assert milliseconds == expected
