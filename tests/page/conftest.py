"""A headless Chromium: MINIDP_BROWSER, the first one on PATH, or playwright's own."""

from __future__ import annotations

import os
import shutil

import pytest

from minidp.overlap import html_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    found = [os.environ.get("MINIDP_BROWSER"), *map(shutil.which, NAMES)]
    path = next(filter(None, found), None)
    is_root = os.geteuid() == 0  # Chromium's sandbox refuses root
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(
                executable_path=path, args=["--no-sandbox"] if is_root else []
            )
        except api.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open the page of recordings; fail if it printed, raised or fetched something."""
    problems, contexts = [], []

    def opened(timelines, **options):
        path = tmp_path / f"page{len(contexts)}.html"
        path.write_text(html_page(timelines), encoding="utf-8")
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.on("request", lambda request: fetched(request.url))
        page.goto(path.as_uri())
        return page

    def fetched(url):
        if not url.startswith(("file:", "data:")):
            problems.append(url)

    yield opened
    for context in contexts:
        context.close()
    assert problems == []
