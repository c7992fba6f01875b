"""The web page in a real browser, while a real vLLM is at work. Screenshots are left in observe-results/."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from conftest import PROJECT, Watched, prompt
from kvbm.config import SETTINGS

RESULTS = PROJECT / "observe-results"
PATIENCE = 180  # seconds: engine, browser and others may share two cores
expect.set_options(timeout=PATIENCE * 1000)
LONGEST = max((setting.env for setting in SETTINGS), key=len)
VIEWS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}, "device_scale_factor": 2},
    "phone-dark": {"color_scheme": "dark", "viewport": {"width": 360, "height": 740}, "device_scale_factor": 2},
}


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


@pytest.fixture(scope="module")
def traffic(watched: Watched) -> Iterator[None]:
    """Four users who take turns with prompts that vLLM's own cache cannot hold together."""
    stop = threading.Event()

    def send() -> None:
        for turn in itertools.count():
            for user in range(4):
                if stop.is_set():
                    return
                watched.stream(prompt(100 + user, 480) + prompt(1000 * turn + user, 40), 8)
                stop.wait(0.1)  # the browser needs a core too

    thread = threading.Thread(target=send)
    thread.start()
    yield
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


class View:
    """A page that is open, and all that its browser complained about."""

    def __init__(self, browser: Browser, url: str, **options) -> None:
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE * 1000)
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("requestfailed", lambda request: self.errors.append(f"{request.url}: {request.failure}"))
        self.page.on("request", lambda r: None if r.url.startswith(url) else self.elsewhere.append(r.url))
        self.page.goto(url)

    def number(self, selector: str) -> float:
        return float(re.sub(r"[^\d.]", "", self.page.locator(selector).first.inner_text()))


@pytest.fixture(params=VIEWS)
def view(request, browser, watched, traffic) -> Iterator[View]:
    view = View(browser, watched.metrics_url, **VIEWS[request.param])
    view.name = request.param
    yield view
    view.context.close()


def test_the_page_is_alive_and_fits(view):
    page = view.page
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#requests tr").nth(5)).to_be_visible(timeout=30_000)

    brought_back = "#tiles .tile:has-text('tokens brought back') dd"
    before = view.number(brought_back)
    newest = page.locator("#requests tr").first.get_attribute("title")
    deadline = time.monotonic() + PATIENCE
    while view.number(brought_back) <= before or page.locator("#requests tr").first.get_attribute("title") == newest:
        assert time.monotonic() < deadline, "nothing moves"
        page.wait_for_timeout(300)

    # A flow with a rate, and a bar that fills.
    expect(page.locator("[data-flow='host-device'] b")).not_to_have_text(re.compile("^0.00 blocks/s"))
    idle = """document.querySelector("[data-tier='host'] .bar i.idle").getBoundingClientRect().width"""
    assert page.evaluate(idle) > 1
    assert page.locator("#findings .finding").count() >= 1

    page.wait_for_timeout(3000)
    RESULTS.mkdir(exist_ok=True)
    page.screenshot(path=RESULTS / f"page-{view.name}.png", full_page=True)
    # Nothing reaches over the edge, not even the longest name of a setting in what is advised.
    assert page.evaluate(f"""() => {{
        document.querySelector("#findings p").append(" Set {LONGEST}=1.");
        return document.documentElement.scrollWidth <= document.documentElement.clientWidth;
    }}""")
    assert view.errors == []
    assert view.elsewhere == []


def test_text_stands_out_from_its_ground(browser, watched, traffic):
    """The contrast of all text is at least 4.5, in both schemes."""
    for scheme in ("light", "dark"):
        view = View(browser, watched.metrics_url, color_scheme=scheme, viewport={"width": 1280, "height": 900})
        expect(view.page.locator("#requests tr").first).to_be_visible(timeout=30_000)
        poor = view.page.evaluate(CONTRAST)
        view.context.close()
        assert poor == [], scheme


def test_a_page_whose_engine_is_gone_says_so(browser, watched):
    view = View(browser, watched.metrics_url)
    expect(view.page.locator("#link")).to_have_text("live")
    view.page.route("**/api/state*", lambda route: route.abort())
    expect(view.page.locator("#link")).to_contain_text("not reachable")
    view.page.unroute("**/api/state*")
    expect(view.page.locator("#link")).to_have_text("live")
    view.context.close()


CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const part = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility() || node.closest("noscript")) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push([node.textContent.slice(0, 40), (a + 0.05) / (b + 0.05)]);
  }
  return poor;
}"""
