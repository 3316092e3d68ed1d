"""The page by mouse, by keyboard and on a phone; its numbers are the report's."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import takewhile

import pytest

from minidp.overlap.advice import _predicted
from minidp.overlap.analysis import overlap_of
from minidp.overlap.forecast import CAPS_MB, analyse
from minidp.overlap.skew import aligned
from minidp.overlap.text import PHASES, report
from minidp.overlap.timeline import Param
from tests.page.recordings import recordings
from tests.page.test_forecast import NOTHING, predicted
from tests.support import timelines as by_hand

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True}
HOSTILE = "</script><img src=x onerror=alert(1)>&amp;'\"<!--data-->/*page.js*/"
FOUR = {"ranks": 4, "steps": 12, "buckets": 5}


def cells(page, name):
    return page.eval_on_selector_all(
        f"#{name} tbody tr",
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))",
    )


def text(page, name):
    return page.text_content(f"#{name}")


def rows_of(words, head, row):
    """The rows of a table of the report, cut at two spaces and more."""
    lines = words.splitlines()
    start = next(n for n, line in enumerate(lines) if line.lstrip().startswith(head))
    rows = takewhile(re.compile(row).match, lines[start + 1 :])
    return [re.split(r" {2,}", line.strip()) for line in rows]


# ------------------------------------------------------------------------ the numbers


@pytest.mark.parametrize("seed", range(12))
def test_sentences_and_tables_are_those_of_the_report(opened, seed):
    check_words(opened, recordings(seed))


@pytest.mark.parametrize("seed", range(4))
def test_logical_ranks_have_the_numbers_of_the_report(opened, seed):
    timelines = recordings(seed, logical=True)
    page, words = check_words(opened, timelines), report(timelines)
    assert cells(page, "turns") == rows_of(words, "logical  rank", r" +\d+ ")
    assert text(page, "about-turns") in words.splitlines()


@pytest.mark.parametrize("seed", range(4))
def test_values_of_divided_steps_have_the_numbers_of_the_report(opened, seed):
    timelines = recordings(seed, divided=True, buckets=3)
    page, words = check_words(opened, timelines), report(timelines)
    assert cells(page, "values") == rows_of(words, "of bucket", r" +\d+ ")
    said = text(page, "about-values")
    assert said.startswith("New values of parameters")
    assert said in words


def check_words(opened, timelines):
    page, words = opened(timelines), report(timelines)
    assert page.text_content("pre") == words
    answers = page.eval_on_selector_all(
        "#answers p", "all => all.map(p => p.textContent)"
    )
    where, said = words.split("\n\n")[:2]
    assert answers == [*said.splitlines(), where.replace("\n", "; ")]
    if page.is_visible("#buckets"):
        assert cells(page, "buckets") == rows_of(words, "bucket  params", r" +\d+ ")
    split = [
        [name, f"{value} ms", share]
        for name, value, share in re.findall(
            r"^  (\S.{20}) +(\S+) ms +(\d+%)", words, re.M
        )
        for name in [name.strip()]
    ]
    assert cells(page, "split") == split
    found = analyse(aligned(timelines))
    assert page.is_visible("#what-if") == (found.forecast is not None)
    assert page.is_visible("#skew") == (found.skew is not None)
    if found.skew is not None:
        ours = [[cell for cell in row if cell] for row in cells(page, "skew")]
        assert ours == rows_of(words, "last is", r" *(\w+ begins|bucket \d+) ")
    return page


@pytest.mark.parametrize("seed", [1, 2])
def test_every_step_of_every_rank_has_the_numbers_of_the_analysis(opened, seed):
    timelines = recordings(seed, ranks=3, steps=4, buckets=4)
    page, run = opened(timelines), aligned(timelines)
    found = page.evaluate(
        "data.steps.map((_, n) => data.ranks.map((_, r) => recorded(n, r)))"
    )
    for ours, steps in zip(found, run.common, strict=True):
        for mine, timeline, step in zip(ours, run.ranks, steps, strict=True):
            one = overlap_of(timeline, step, run.launches[step.number])
            values = {name: getattr(one, name) for name in PHASES.values()}
            assert mine["totals"].items() >= values.items()
            for left, right in zip(mine["buckets"], one.buckets, strict=True):
                for name in ("full", "waited", "late", "wire", "hidden", "exposed"):
                    assert left[name] == getattr(right, f"{name}_s")
                assert left["nbytes"] == right.nbytes


# ------------------------------------------------------------------ what a person does


def test_sliders_predict_what_python_predicts(opened):
    timelines = recordings(5, **FOUR)
    page, found = opened(timelines), analyse(aligned(timelines))
    forecast = found.forecast
    before = page.inner_html("#forecast")
    page.focus("#s-cap")
    for n, cap in enumerate(CAPS_MB, 1):
        page.keyboard.press("ArrowRight")
        gain, schedule = predicted(forecast, NOTHING | {"cap": cap}, 4)
        sentence = _predicted(forecast.step_s, gain).removeprefix("predicted ")
        assert text(page, "predicted").startswith(f"Predicted {sentence}")
        assert f"{len(schedule.buckets)} bucket" in text(page, "predicted-more")
        assert page.input_value("#s-cap") == f"{n}"
        assert page.inner_text("output[for=s-cap]") == f"{cap:g} MiB"
    assert page.inner_html("#forecast") != before
    for name in ("s-bus", "s-latency", "s-ranks"):
        page.focus(f"#{name}")
        page.keyboard.press("Home")
        was = text(page, "predicted")
        page.keyboard.press("End")
        assert text(page, "predicted") != was, name
    page.get_by_label("Send half the bytes").check()
    page.get_by_role("button", name="As recorded").click()
    assert text(page, "predicted").startswith("As recorded")
    assert page.inner_html("#forecast") == before
    assert not page.get_by_label("Send half the bytes").is_checked()
    page.get_by_role("button", name="10 Gbit/s").click()
    assert page.inner_text("output[for=s-bus]") == "10 Gbit/s"
    change = NOTHING | {"bus": 1.25e9}
    sentence = _predicted(forecast.step_s, predicted(forecast, change, 4)[0])
    assert sentence[len("predicted ") :] in text(page, "predicted")


def test_the_best_cap_is_that_of_the_other_settings(opened):
    page = opened(recordings(5, **FOUR))
    for setting in ("10 Gbit/s", "As recorded"):
        page.get_by_role("button", name=setting).click()
        best = page.get_by_role("button", name="Best cap here")
        promised = best.inner_text().partition("(")[2]  # "5% shorter)"
        cap = best.inner_text().removeprefix("Best cap here: ").partition(" (")[0]
        best.click()
        assert page.inner_text("output[for=s-cap]") == cap
        assert f"({promised}" in text(page, "predicted")


def test_a_balanced_load_gains_what_the_advice_says(opened):
    """Rank 1 comes 40 ms late to bucket 1 in each step."""
    late = []
    for rank, at in enumerate((30, 70)):
        buckets = [(12, 12, 14, 75), (at, at, 74, 75)]
        more = {"backward": (10, at + 1), "end": 100, "optimizers": []}
        steps = [by_hand.step(n, buckets, at=100 * n, **more) for n in range(4)]
        late.append(by_hand.timeline(steps, rank=rank))
    page = opened(late)
    assert "predicted 60 ms instead of 100 ms per step" in text(page, "answers")
    page.get_by_label("Balance the load").check()
    assert text(page, "predicted").startswith("Predicted 60 ms instead of 100 ms")
    page.get_by_role("button", name="As recorded").click()
    assert text(page, "predicted").startswith("As recorded: 100 ms per step")


def test_keys_move_through_steps_time_and_buckets(opened):
    page = opened(recordings(6, **FOUR))
    page.focus("#step")
    page.keyboard.press("Home")
    assert text(page, "step-number").startswith("0")
    page.keyboard.press("ArrowRight")
    assert text(page, "step-number").startswith("1")
    assert "in step 1" in text(page, "about-buckets")
    page.get_by_role("button", name="Typical step").click()
    assert text(page, "step-number").endswith("(typical)")
    whole = page.inner_html("#timeline")
    page.focus("#timeline")
    for key in ("+", "+", "ArrowRight", "ArrowLeft", "-"):
        was = page.inner_html("#timeline")
        page.keyboard.press(key)
        assert page.inner_html("#timeline") != was, key
    page.keyboard.press("0")
    assert page.inner_html("#timeline") == whole
    page.focus("#buckets tr[data-bucket='0']")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert text(page, "detail").startswith("Bucket 2 on rank")
    assert page.locator("tr.chosen").get_attribute("data-bucket") == "2"
    bright = page.locator("#timeline [data-bucket]:not(.dim)")
    assert {each.get_attribute("data-bucket") for each in bright.all()} == {"2"}
    page.keyboard.press("Escape")
    page.focus("#step")
    assert page.locator("#timeline .dim").count() == 0
    page.locator("#timeline [role=button]").nth(3).focus()
    page.keyboard.press("Enter")
    assert "of rank 3" in text(page, "about-buckets")
    assert page.input_value("#rank") == "3"


def test_the_pointer_shows_layers_and_bytes_drags_and_zooms(opened):
    page = opened(recordings(7, **FOUR))
    bar = page.locator("#timeline rect.k[data-bucket='3']").last
    bar.scroll_into_view_if_needed()
    bar.hover()
    tip = page.inner_text("#tip")
    assert re.match(r"bucket 3, rank \d: [\d.]+ MiB\n.+: [\d.]+ ms\nfrom ", tip)
    assert "net." in tip
    assert page.locator("#buckets tr.chosen").get_attribute("data-bucket") == "3"
    bar.click()
    page.mouse.move(1, 1)
    assert text(page, "detail").startswith("Bucket 3")
    box, was = page.locator("#timeline").bounding_box(), page.inner_html("#timeline")
    page.mouse.move(box["x"] + 400, box["y"] + 60)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_function("html => $('timeline').innerHTML !== html", arg=was)
    was = page.evaluate("state.view[0]")
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 60, steps=4)
    page.mouse.up()
    assert page.evaluate("state.view[0]") > was
    page.get_by_role("button", name="Whole step").click()
    assert page.evaluate("state.view") is None


def test_a_logical_rank_is_a_row_of_its_rank(opened):
    timelines = recordings(3, ranks=2, buckets=3, steps=3, logical=True)
    page, run = (
        opened(timelines, viewport={"width": 1600, "height": 900}),
        aligned(timelines),
    )
    page.evaluate("show({ step: 0, rank: 1 })")
    rows = page.evaluate(
        "data.ranks.map((_, r) => { const one = recorded(0, r); "
        "return rowsOf(barsOf(one, r), one, r); })"
    )
    origin = min(one.steps[0].begin_ns for one in run.ranks)
    labels = []
    for (band, *own), one in zip(rows, run.ranks, strict=True):
        step = one.steps[0]
        names = [f"logical {turn.number}" for turn in step.turns]
        labels += names
        assert [row["label"] for row in own] == names
        band = [bar for bar in band["bars"] if bar["kind"] == "turn"]
        assert [bar["text"] for bar in band] == names
        forwards = [*step.local_forwards, *step.forwards]
        backwards = [*step.local_backwards, step.backward]
        for row, *spans in zip(own, forwards, backwards, strict=True):
            computes = [bar for bar in row["bars"] if "optimizer" not in bar["kind"]]
            ends = [(bar["begin"] + origin, bar["end"] + origin) for bar in computes]
            assert ends == [(span.begin_ns, span.end_ns) for span in spans]
            assert [bar["text"] for bar in computes] == ["forward", "backward"]
            assert all(f", {row['label'][:7]} rank" in bar["tip"] for bar in computes)
    drawn = page.locator("#timeline text.soft").all_text_contents()
    assert [each for each in drawn if each.startswith("logical")] == labels
    legend = page.locator("#legend").inner_text()
    assert "turn of a logical rank" in legend
    assert "no_sync()" not in legend
    assert page.get_by_label("Send half the bytes").count() == 0  # a hook is refused


def test_values_have_a_row_below_each_rank(opened):
    timelines = recordings(3, ranks=2, buckets=3, steps=3, divided=True)
    page, run = opened(timelines), aligned(timelines)
    found = page.evaluate(
        "data.steps.map((_, n) => data.ranks.map((_, r) => "
        "barsOf(recorded(n, r), r).values.bars))"
    )
    for n, ranks in enumerate(found):
        origin = min(one.steps[n].begin_ns for one in run.ranks)
        for bars, one in zip(ranks, run.ranks, strict=True):
            step = one.steps[n]
            exposed = [bar for bar in bars if bar["kind"] == "values, exposed"]
            total = sum(bar["end"] - bar["begin"] for bar in exposed)
            assert total / 1e9 == pytest.approx(overlap_of(one, step).values_s)
            assert all(f"\nbucket {bar['text']}" in bar["tip"] for bar in exposed)
            hidden = [bar for bar in bars if bar["kind"] == "values, hidden"]
            assert {bar["text"] for bar in hidden} <= {""}
            for bar in bars:
                assert step.begin_ns <= bar["begin"] + origin
                assert bar["end"] + origin <= step.end_ns
    drawn = page.locator("#timeline text.soft").all_text_contents()
    assert drawn.count("values") == 2
    legend = page.locator("#legend").inner_text()
    assert "values come back, exposed" in legend
    assert page.locator("#timeline rect.k-values-exposed[data-bucket='1']").count()
    page.locator("#buckets tr[data-bucket='1']").click()
    bright = page.locator("#timeline [data-bucket]:not(.dim)")
    assert {each.get_attribute("data-bucket") for each in bright.all()} == {"1"}


def test_without_divided_steps_nothing_speaks_of_values(opened):
    page = opened(recordings(3, ranks=2, buckets=3))
    assert not page.is_visible("#of-values")
    assert "values" not in page.locator("main").inner_text().lower()


def test_without_logical_ranks_nothing_speaks_of_them(opened):
    page = opened(recordings(3, ranks=2, buckets=3))
    assert not page.is_visible("#of-turns")
    assert "logical" not in page.locator("main").inner_text()
    assert page.get_by_label("Send half the bytes").count() == 1


# ------------------------------------------------------------------- how it looks


@pytest.mark.parametrize(
    "options", [PHONE, {"viewport": {"width": 1200, "height": 800}}]
)
@pytest.mark.parametrize("logical", [False, True])
def test_it_fits_and_no_text_of_an_axis_covers_another(opened, options, logical):
    page = opened(recordings(8, **FOUR, logical=logical), **options)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for name in ("timeline", "forecast", "caps"):
        boxes = page.eval_on_selector_all(
            f"#{name} text:not(.on)",
            "all => all.map(t => { const b = t.getBBox(); "
            "return [b.x, b.y, b.x + b.width, b.y + b.height]; })",
        )
        for n, (x, y, right, bottom) in enumerate(boxes):
            for other in boxes[n + 1 :]:
                is_apart = x >= other[2] or other[0] >= right
                assert is_apart or y >= other[3] - 3 or other[1] >= bottom - 3
        assert all(x >= -1 for x, *_ in boxes)


def test_dark_and_light_have_legible_ink(opened):
    for scheme in ("light", "dark"):
        page = opened(recordings(9, ranks=2), color_scheme=scheme)
        ink, paper = page.evaluate(
            "(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))"
        )
        assert contrast(ink, paper) > 12
        soft = page.evaluate("getComputedStyle(document.querySelector('.note')).color")
        assert contrast(soft, paper) > 4.5


def contrast(one, other):
    """Of two colours "rgb(r, g, b)", as WCAG defines it."""

    def light(colour):
        parts = [int(n) / 255 for n in re.findall(r"\d+", colour)[:3]]
        linear = [
            p / 12.92 if p <= 0.04 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    return max(light(one), light(other)) / min(light(one), light(other))


# ------------------------------------------------------------------- odd recordings


def test_names_of_layers_are_text(opened):
    timelines = []
    for one in recordings(10, **FOUR):
        params = [Param(f"{HOSTILE}.{p.name}", p.nbytes, p.kind) for p in one.params]
        timelines.append(replace(one, params=tuple(params)))
    page = opened(timelines)
    assert page.text_content("pre") == report(timelines)
    assert all(row[-1].startswith(HOSTILE) for row in cells(page, "buckets"))
    page.locator("#buckets tr[data-bucket='1']").click()
    assert HOSTILE in text(page, "detail")
    assert page.locator("img").count() == 0


@pytest.mark.parametrize(
    ("options", "hidden", "shown"),
    [
        ({"ranks": 1, "steps": 1}, ["skew"], ["buckets", "timeline"]),
        ({"ranks": 2, "steps": 3, "buckets": 0}, ["buckets", "what-if"], ["timeline"]),
        ({"ranks": 3, "steps": 1, "buckets": 1}, [], ["buckets", "what-if", "skew"]),
    ],
)
def test_small_recordings_show_what_they_have(opened, options, hidden, shown):
    page = opened(recordings(11, **options))
    assert [page.is_visible(f"#{name}") for name in hidden] == [False] * len(hidden)
    assert [page.is_visible(f"#{name}") for name in shown] == [True] * len(shown)


def test_a_recording_without_steps_says_what_to_do(opened):
    timelines = [replace(one, steps=()) for one in recordings(12, ranks=2)]
    page = opened(timelines)
    assert "No complete step was recorded" in text(page, "answers")
    assert not page.is_visible("#timeline")
    assert not page.is_visible("#tiles")
