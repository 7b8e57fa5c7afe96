"""A real headless Chromium for tests: Debian's `chromium` and `chromium-driver`."""

import base64
import importlib.util
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from selenium import webdriver
from selenium.common.exceptions import SessionNotCreatedException, StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service as Driver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

PATIENCE_SECONDS = 600
"""So long may a page stay as it is: whatever goes on, however slowly, changes what it says."""
STARTS = 3
"""Times that a browser is started: on a busy machine the driver may give up on it."""
SIZES = {1440: 900, 390: 844}
AXE = """
const done = arguments[arguments.length - 1];
axe.run(document, {resultTypes: ["violations"]}).then(
  found => done(found.violations.map(v => [v.impact, v.id, v.nodes.map(n => n.html)])));
"""


def find_chromium() -> tuple[str, str]:
    """Browser and driver, or the test is skipped with the reason."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no chromium or chromedriver: apt-get install chromium chromium-driver")
    return browser, driver


def axe_script() -> str:
    """axe-core: the file that $GNNPLAN_AXE names, else that of the package axe-core-python."""
    named = os.environ.get("GNNPLAN_AXE")
    if named:
        return Path(named).read_text()
    spec = importlib.util.find_spec("axe_core_python")
    if spec is None or spec.origin is None:
        pytest.skip("no axe-core: pip install axe-core-python, or set GNNPLAN_AXE")
    return (Path(spec.origin).parent / "axe.min.js").read_text()


@contextmanager
def served(app: FastAPI) -> Generator[str]:
    """The service on a free port of this machine."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.started
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)


@contextmanager
def chromium() -> Generator["Browser"]:
    """A headless browser."""
    binary, driver = find_chromium()
    options = Options()
    options.binary_location = binary
    for each in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(each)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    web = started(options, driver)
    web.set_page_load_timeout(PATIENCE_SECONDS)
    web.set_script_timeout(PATIENCE_SECONDS)
    try:
        yield Browser(web)
    finally:
        web.quit()


def started(options: Options, driver: str) -> WebDriver:
    """A browser, started again where its driver lost patience with it."""
    for _ in range(STARTS - 1):
        with suppress(SessionNotCreatedException):
            return webdriver.Chrome(options=options, service=Driver(driver))
    return webdriver.Chrome(options=options, service=Driver(driver))


class Browser:
    """What the tests do with a page."""

    def __init__(self, web: WebDriver) -> None:
        self.web: Any = web
        self.said = list[str]()
        self.pressed = 0
        self.look(1440, dark=False)

    def look(self, width: int, *, dark: bool) -> None:
        """Be so wide, and light or dark."""
        size = {"width": width, "height": SIZES[width], "deviceScaleFactor": 1}
        self._cdp("Emulation.setDeviceMetricsOverride", {**size, "mobile": width < 600})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._cdp("Emulation.setEmulatedMedia", {"features": [scheme]})

    def _cdp(self, command: str, values: dict[str, Any]) -> Any:
        return self.web.execute_cdp_cmd(command, values)

    def find(self, css: str) -> Any:
        """The first element, once the page has it."""
        found = self.until(lambda: self.web.find_elements(By.CSS_SELECTOR, css), css)
        return found[0]

    def press(self, words: str) -> None:
        """The button or link of those words, by the keyboard's Enter."""
        xpath = f"//main//*[self::button or self::a][normalize-space()='{words}']"

        def pressed() -> bool:
            for element in self.web.find_elements(By.XPATH, xpath):
                # A refresh may replace it between finding and using it: then again.
                with suppress(StaleElementReferenceException):
                    element.send_keys("\n")
                    self.pressed += 1
                    return True
            return False

        self.until(pressed, words)

    def wait_for(self, words: str) -> None:
        """Until the page says so."""
        self.until(lambda: words in self.text(), words)

    def text(self) -> str:
        """What is to be read on the page; nothing while the next one comes."""
        return self.web.execute_script("return document.body ? document.body.innerText : ''")

    def until(self, asked: Callable[[], Any], words: str) -> Any:
        """What an act gives once it gives something.

        A refusal or a failed job ends the wait, and a page that says the same for too long.
        """
        said, changed = "", time.monotonic()
        while not (found := asked()):
            text = self.text()
            if text != said:
                said, changed = text, time.monotonic()
            assert time.monotonic() - changed < PATIENCE_SECONDS, (words, text)
            assert self.complaints() == [], (words, text)
            assert not self.web.find_elements(By.CSS_SELECTOR, "[role=alert]"), self.text()
            time.sleep(0.2)
        return found

    def complaints(self) -> list[str]:
        """What the console said so far: refused requests, not found, script errors."""
        self.said += [line["message"] for line in self.web.get_log("browser")]
        return self.said

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return self.web.execute_script(
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )

    def beyond(self, css: str) -> float:
        """Pixels by which an element reaches beyond the window's right edge."""
        asked = "return arguments[0].getBoundingClientRect().right - window.innerWidth"
        return self.web.execute_script(asked, self.find(css))

    def violations(self) -> list[Any]:
        """What axe-core calls serious or critical."""
        self.web.execute_cdp_cmd("Runtime.evaluate", {"expression": axe_script()})
        found = self.web.execute_async_script(AXE)
        return [each for each in found if each[0] in ("serious", "critical")]

    def shoot(self, name: str) -> None:
        """The whole page as a picture in $GNNPLAN_SCREENSHOTS, else in .screens."""
        folder = Path(os.environ.get("GNNPLAN_SCREENSHOTS") or ".screens")
        folder.mkdir(parents=True, exist_ok=True)
        size = self._cdp("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        values = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        picture = self._cdp("Page.captureScreenshot", values)
        (folder / f"{name}.png").write_bytes(base64.b64decode(picture["data"]))
