"""The page as a file: what it holds and how large it is. tests/page opens it."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import minidp.overlap
from minidp.overlap import html_page, report
from minidp.overlap.timeline import ClockOffset
from tests.page.recordings import recordings

MEGABYTE = 1_000_000
LAYOUT = {"ranks": 8, "steps": 50}
PORT = Path(minidp.overlap.__file__).parent


def data_of(text):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    return json.loads(found[1])


def test_fifty_steps_of_eight_ranks_stay_below_a_megabyte():
    text = html_page(recordings(0, buckets=20, **LAYOUT))
    assert len(text.encode()) < MEGABYTE
    assert len(data_of(text)["steps"]) == 50


def test_of_more_than_fits_the_last_and_the_typical_step_are_kept():
    timelines = recordings(1, buckets=90, **LAYOUT)
    text = html_page(timelines)
    assert len(text.encode()) < MEGABYTE
    found = data_of(text)
    numbers = [step["number"] for step in found["steps"]]
    assert 10 < len(numbers) < 50
    assert numbers[-1] == 49
    assert f"(step {numbers[found['typical']]}) of 50 steps" in report(timelines)


def test_it_needs_nothing_else():
    text = html_page(recordings(2, ranks=2))
    assert not re.search(r"(src|href)=[\"'](?!data:)|@import|url\((?!#)", text)
    assert "/*page.js*/" not in text
    assert "default-src 'none'" in text


@pytest.mark.parametrize(
    "name", ["</script>", "<!--", "&lt;", "\u2028", "\ud800", "$&"]
)
def test_what_was_recorded_is_no_markup(name):
    timelines = recordings(3, ranks=2, buckets=2)
    for n, one in enumerate(timelines):
        params = tuple(replace(p, name=f"{name}.{p.name}") for p in one.params)
        timelines[n] = replace(one, params=params)
    text = html_page(timelines)
    assert text.count("<script") == text.count("</script>") == 3
    assert data_of(text)["layers"][0].startswith(name)
    assert html.escape(report(timelines)) in text
    assert text.encode(errors="surrogatepass")


def test_ranks_of_unknown_clocks_begin_at_0():
    one, two = recordings(4, ranks=2, steps=2, buckets=0)
    two = replace(two.moved(10**12), where=replace(two.where, host="there"))
    found = data_of(html_page([one, two]))
    assert not found["clocks_known"]
    gaps = [rank["phases"][1] for rank in found["steps"][0]["ranks"]]
    assert max(gaps) < 10**9
    two = replace(two, clock=ClockOffset(10**12, 5))
    one = replace(one, clock=ClockOffset(0, 0))
    assert data_of(html_page([one, two]))["clocks_known"]


def test_ranks_without_a_common_step_and_other_runs():
    one, two = recordings(5, ranks=2, steps=3)
    text = html_page([one, replace(two, steps=())])
    assert "The ranks recorded no step in common" in text
    assert data_of(text)["steps"] == []
    with pytest.raises(ValueError, match="different ranks"):
        html_page([one, one])


def test_sources_of_the_page_are_small():
    sources = [(PORT / name).read_text() for name in ("page.js", "forecast.js")]
    style = (PORT / "page.html").read_text().partition("</style>")[0]
    assert sum(len(each.splitlines()) for each in (*sources, style)) < 950
