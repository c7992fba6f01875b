"""The web page in a real browser, in states that a healthy engine rarely shows. Screenshots: observe-results/."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import msgspec
import pytest
from playwright.sync_api import Browser, expect, sync_playwright
from test_page import View

import observed
from conftest import PROJECT
from kvbm.bench import report
from kvbm.bench.results import Result, Run, Sample, summarise
from kvbm.observe import web
from kvbm.observe.snapshot import HitRates, Saved

RESULTS = PROJECT / "observe-results"
PHONE = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2}


class MovingSource(observed.FixedSource):
    """As a living engine: every snapshot is of its own moment, and blocks move."""

    def __init__(self, **changes) -> None:
        super().__init__(observed.snapshot(started=time.time() - 600, **changes))
        self.is_stuck = False

    def snapshot(self, requests: int = 0):
        if not self.is_stuck:
            age = time.time() - self.now.started
            flows = [msgspec.structs.replace(flow, bytes=int(age * 1e8)) for flow in self.now.flows]
            self.now = msgspec.structs.replace(self.now, at=time.time(), flows=flows)
        return super().snapshot(requests)


@pytest.fixture(scope="module")
def browser(tools) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=tools["chromium"],
            args=["--no-sandbox", "--disable-gpu"],
            env={"LD_LIBRARY_PATH": ":".join(tools["libraries"]), "PATH": "/usr/bin:/bin"},
        )
        yield browser
        browser.close()


@pytest.fixture
def show(browser, monkeypatch):
    """Serves a source and opens its page: ``show(source, **options)``."""
    monkeypatch.setattr(web, "HISTORY_EVERY_SECONDS", 0.4)
    opened = []

    def show(source, wait: float = 0.0, **options):
        server = observed.Here(source, web.Limits())
        server.start()
        time.sleep(wait)
        view = View(browser, server.url, **{"viewport": {"width": 1280, "height": 900}, **options})
        opened.append((server, view))
        expect(view.page.locator("#link")).to_have_text("live")
        return server, view.page

    yield show
    RESULTS.mkdir(exist_ok=True)
    for server, view in opened:
        view.context.close()
        server.close()


def test_a_dead_engine_takes_the_verdicts_place(show):
    server, page = show(MovingSource(failures={}))
    expect(page.locator("#findings")).to_contain_text("It helps")
    server.close()
    expect(page.locator("#findings")).to_contain_text("The engine does not answer. It has ended")
    expect(page.locator("#findings")).to_contain_text("The figures below are of")
    expect(page.locator("#findings")).not_to_contain_text("It helps")
    page.screenshot(path=RESULTS / "page-dead.png", full_page=True)


def test_a_silent_engine_is_noticed_although_the_server_answers(show):
    source = MovingSource(failures={})
    _, page = show(source)
    source.is_stuck = True
    expect(page.locator("#findings")).to_contain_text("It has been silent for 1", timeout=40_000)
    source.is_stuck = False
    expect(page.locator("#findings")).to_contain_text("It helps")
    expect(page.locator("#link")).to_have_text("live")


def test_the_minutes_before_the_page_was_opened_are_there(show):
    _, page = show(MovingSource(failures={}), wait=6.0)
    points = page.locator("#history polyline").first.get_attribute("points").split()
    assert len(points) >= 5
    # Five minutes are 300 units wide: the oldest point is at least five seconds old.
    assert float(points[-1].split(",")[0]) - float(points[0].split(",")[0]) >= 5
    expect(page.locator("#history")).not_to_contain_text("onboard 0 B/s")


def test_an_idle_engine_has_no_big_numbers(show):
    idle = {"hit_rates": HitRates(), "saved": Saved(prefill_tokens_per_second=10_000.0), "requests": []}
    _, page = show(MovingSource(failures={}, matched_tokens=0, outcomes={}, missed={}, **idle))
    values = {
        tile.locator("dt").inner_text(): tile.locator("dd").inner_text().splitlines()
        for tile in page.locator("#tiles .tile").all()
    }
    assert values["prefill"] == ["–", "not measured yet"]
    assert values["time to first token saved"] == ["–", "no load yet"]
    assert values["hit rate, host"] == ["–", "no request yet"]
    expect(page.locator("#history")).to_contain_text("host –")
    # No line either: nothing is known of the past.
    lines = page.locator("#history .plot").nth(1).locator("polyline").all()
    assert [line.get_attribute("points") for line in lines] == ["", ""]
    page.screenshot(path=RESULTS / "page-idle.png", full_page=True)


def test_names_and_legends_are_of_what_there_is(show):
    identity = msgspec.structs.replace(observed.IDENTITY, device="CPU")
    _, page = show(MovingSource(failures={}, identity=identity, tiers=[observed.HOST]), **PHONE)
    expect(page.locator("[data-tier='device']")).to_contain_text("CPU (the engine's own cache)")
    assert "GPU" not in page.locator("main").inner_text()
    assert page.locator("#sources").inner_text().split("\n") == [
        "tokens of the prompt:", "the engine had them", "from host", "computed",
    ]  # fmt: skip
    # Every line of a plot has a key of its colour, and the plots have a scale.
    for plot, scale in zip(page.locator("#history .plot").all(), ("B/s", "100 %"), strict=True):
        colour = "getComputedStyle(node).{}"
        lines = [line.evaluate(f"node => {colour.format('stroke')}") for line in plot.locator("polyline").all()]
        keys = [key.evaluate(f"node => {colour.format('backgroundColor')}") for key in plot.locator("i.key").all()]
        assert lines == keys
        expect(plot).to_contain_text(re.compile(f"5 min ago.*full height: .*{scale}.*now", re.DOTALL))
    # A key and its word are on one line, and no word is broken.
    for item in page.locator(".legend span, .plot p b span").all():
        assert item.bounding_box()["height"] < 26
    page.screenshot(path=RESULTS / "page-cpu-phone.png", full_page=True)


def test_the_tables_of_a_benchmark_fit_a_screen(browser):
    samples = [
        Sample(user=1, round=n, started=n, finished=n + 2.5, ttft=0.123456, prompt_tokens=23_456, cached_tokens=20_000,
               output_tokens=100, gaps=[0.0123] * 99)
        for n in range(20)
    ]  # fmt: skip
    counters = dict.fromkeys(("prompt_tokens", "kvbm_onboard_blocks_h2d", "external_cache_hit_tokens"), 1234567.0)
    runs = [
        Run(target=name, url="http://a:8000", qps=qps, summary=summarise(samples), samples=samples, server=counters)
        for qps in (0.25, 0.5, 1.0)
        for name in ("vllm-alone", "vllm-with-kvbm")
    ]  # fmt: skip
    result = Result(taken="2026-11-17", command=[], model="m", workload={}, machine={}, runs=runs)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_content(report.page([result]))
    wide = "document.querySelectorAll('.scroll').forEach(d => { if (d.scrollWidth > d.clientWidth) throw d.innerText })"
    page.evaluate(wide)
    assert page.evaluate("document.documentElement.scrollWidth <= 1280")
    RESULTS.mkdir(exist_ok=True)
    page.screenshot(path=RESULTS / "bench.png", full_page=True)
    page.close()
