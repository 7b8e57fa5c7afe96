"""The dashboard in a real browser: made, watched, opened, compared, cancelled, by the keyboard."""

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="selenium is not installed: pip install selenium")

from selenium.webdriver.common.action_chains import ActionChains

from gnnplan.api.app import create_app
from gnnplan.api.requests import NoopRequest
from gnnplan.api.service.context import Caller, Service, ServiceSettings
from gnnplan.api.service.jobs import get_job, submit_noop
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime.graph.dataset import Graph
from tests.api.dashboard.chromium import SIZES, Browser, chromium, served
from tests.support.probed import keep_as_probed

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
CALLER = Caller(principal="local")


@pytest.fixture
def running(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Service, str, Browser]]:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    app = create_app(
        ServiceSettings(data_dir=tmp_path / "data", graph_roots=(small_graph.path.parent,))
    )
    with served(app) as address, chromium() as browser:
        yield app.state.service, address, browser


def make_plan(browser: Browser, address: str, machine: str, ranks: int) -> None:
    """From the first page to the plan's, with what a user does."""
    browser.web.get(address)
    browser.press("New plan")
    browser.find(f"#machine option[value='{machine}']").click()
    for name, value in (("devices", ranks), ("fanouts", "5,5"), ("hidden", 16)):
        browser.find(f"#{name}").clear()
        browser.find(f"#{name}").send_keys(str(value))
    browser.press("Plan")
    browser.wait_for("Open the plan")
    browser.press("Open the plan")
    browser.wait_for("The predicted step")


def look_at(browser: Browser, name: str) -> None:
    """Wide and narrow, light and dark: nothing serious, nothing beside the page, no complaint."""
    for width in SIZES:
        for dark in (False, True):
            browser.look(width, dark=dark)
            assert browser.violations() == [], (name, width, dark)
            assert browser.overflow() <= 0, (name, width)
            browser.shoot(f"{name}-{width}-{'dark' if dark else 'light'}")
    browser.look(1440, dark=False)
    assert browser.complaints() == []


def test_a_plan_is_made_watched_opened_and_compared(running: tuple[Service, str, Browser]):
    _, address, browser = running
    browser.web.get(address)
    look_at(browser, "empty")
    browser.web.get(f"{address}/plans/new")
    look_at(browser, "form")
    make_plan(browser, address, "siton", 8)
    look_at(browser, "plan")
    browser.press("The same in large, with all links")
    browser.wait_for("Everything here is predicted")
    look_at(browser, "topology")
    browser.look(390, dark=False)
    assert browser.beyond(".picture") <= 0
    browser.look(1440, dark=False)
    make_plan(browser, address, "siton", 4)
    browser.press("Compare")
    browser.wait_for("Predicted differently")
    look_at(browser, "compare")
    browser.web.get(f"{address}/plans")
    look_at(browser, "plans")
    for machine in ("dgx-v100", "hgx-h100"):
        browser.web.get(f"{address}/machines/{machine}")
        look_at(browser, machine)
    browser.web.get(f"{address}/machines")
    look_at(browser, "machines")


def test_a_first_plan_takes_at_most_five_clicks(
    running: tuple[Service, str, Browser], tmp_path: Path
):
    _, address, browser = running
    (tmp_path / "cache").mkdir(exist_ok=True)
    # As if this machine had been probed; the first plan of all waits for that, without a click.
    keep_as_probed(tmp_path / "cache")
    browser.web.get(address)
    for words in ("New plan", "Plan", "Open the plan"):
        browser.press(words)
    browser.wait_for("The predicted step")
    assert browser.pressed <= 5


def test_a_running_job_is_cancelled(running: tuple[Service, str, Browser]):
    service, address, browser = running
    job = submit_noop(service, CALLER, NoopRequest(seconds=3000.0, steps=1000))
    browser.web.get(f"{address}/jobs/{job.id}")
    browser.wait_for("running")
    look_at(browser, "job")
    browser.web.get(f"{address}/jobs")
    look_at(browser, "jobs")
    browser.web.get(f"{address}/jobs/{job.id}")
    browser.press("Cancel this job")
    browser.wait_for("cancelled")
    assert get_job(service, job.id).state == "cancelled"


def test_a_run_is_watched(running: tuple[Service, str, Browser]):
    _, address, browser = running
    make_plan(browser, address, "cpu-2core", 1)
    browser.find("#force").send_keys(" ")  # the preset is not this machine
    browser.find("#epochs").clear()
    browser.find("#epochs").send_keys("6")
    browser.press("Train")
    browser.wait_for("smoothed, weight 0.6")
    look_at(browser, "live")
    browser.wait_for("succeeded")
    browser.wait_for("Seconds per step by stage")
    look_at(browser, "run")


def test_the_first_tab_skips_to_the_content(running: tuple[Service, str, Browser]):
    _, address, browser = running
    browser.web.get(address)
    browser.find("body").send_keys("\t")
    focused = browser.web.switch_to.active_element
    assert focused.text == "Skip to the content"
    focused.send_keys("\n")
    assert browser.web.current_url.endswith("#main")


def names(browser: Browser, table: str) -> list[str]:
    """The first cells of a table's rows that are seen."""
    rows = browser.web.find_elements("css selector", f"{table} tbody tr")
    return [row.find_element("css selector", "th").text for row in rows if row.is_displayed()]


def test_a_long_table_is_searched_sorted_and_saved(
    running: tuple[Service, str, Browser], tmp_path: Path
):
    _, address, browser = running
    browser.web.get(f"{address}/machines/hgx-h100")
    table = "section[aria-labelledby=links] table"
    browser.find("section[aria-labelledby=links] input[type=search]").send_keys("GPU3 ")
    wanted = names(browser, table)
    links = [link for link in load_preset("hgx-h100").links
             if "gpu3" in f"{link.name} {link.source} {link.target}"]  # fmt: skip
    assert sorted(wanted) == sorted(link.name for link in links)
    kept = tmp_path / "kept"
    browser.web.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(kept)}
    )
    browser.find("section[aria-labelledby=links] button[aria-label^='Save as CSV']").click()
    (file,) = browser.until(lambda: list(kept.glob("*.csv")), "a file")
    lines = list(csv.reader(file.read_text().splitlines()))
    assert lines[0] == ["Link", "Rate", "Rate is", "From", "To"]
    assert [line[0] for line in lines[1:]] == wanted
    browser.find("section[aria-labelledby=links] input[type=search]").clear()
    browser.find("section[aria-labelledby=links] input[type=search]").send_keys(" ")
    browser.find(f"{table} th:nth-child(2) button").click()
    rates = {link.name: link.bandwidth_bytes_per_second for link in load_preset("hgx-h100").links}
    assert [rates[name] for name in names(browser, table)] == sorted(rates.values())
    browser.find(f"{table} th:nth-child(2) button").click()
    assert [rates[name] for name in names(browser, table)] == sorted(rates.values())[::-1]
    assert browser.complaints() == []


def test_a_table_without_scripts_is_whole(running: tuple[Service, str, Browser]):
    _, address, browser = running
    browser.web.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.web.get(f"{address}/machines/hgx-h100")
    found = names(browser, "section[aria-labelledby=links] table")
    assert sorted(found) == sorted(link.name for link in load_preset("hgx-h100").links)
    assert browser.web.find_elements("css selector", "input[type=search]") == []


def test_what_is_pointed_at_says_what_it_is(running: tuple[Service, str, Browser]):
    _, address, browser = running
    browser.web.get(f"{address}/machines/dgx-v100")
    box = browser.find(".picture .part.gpu")
    tip = box.find_element("xpath", "../*[@class='tip']")
    seen = "return getComputedStyle(arguments[0]).visibility"
    assert browser.web.execute_script(seen, tip) == "hidden"
    ActionChains(browser.web).move_to_element(box).perform()
    assert browser.web.execute_script(seen, tip) == "visible"
    assert "GPU" in tip.text
    assert browser.web.execute_script(seen, browser.find(".picture .hint")) == "hidden"
