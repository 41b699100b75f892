"""The report in a real browser: it draws, fits, repaints in the dark, and asks nobody."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Tab, find_browser, open_browser
from report_runs import faster, with_counters

from nwor_bench.analysis.analyse import analyse
from nwor_bench.report.document import Figure, Table
from nwor_bench.report.html import render_html
from nwor_bench.report.run_report import build_document

STATE = """(() => {
  const all = (query, root = document) => [...root.querySelectorAll(query)];
  const box = node => node.getBoundingClientRect();
  const plots = all(".plot");
  const inside = (inner, outer) => inner.left >= outer.left - 1 && inner.right <= outer.right + 1
    && inner.top >= outer.top - 1 && inner.bottom <= outer.bottom + 1;
  const name = plots[0].querySelector("text");
  return {
    page: document.documentElement.scrollWidth,
    drawn: plots.filter(p => all("svg", p).length && p.closest("details:not([open])") === null
      && box(p).height > 100).map(p => p.parentElement.id),
    marks: plots.map(p => all("use, path", p).length),
    clipped: plots.flatMap(p => all("text", p).filter(t => t.textContent.trim()
      && !inside(box(t), box(p.querySelector("svg")))).map(t => p.id + ": " + t.textContent)),
    height: document.documentElement.scrollHeight,
    unpainted: all("[style*='#0f1e'], [fill*='#0f1e']").length,
    named: plots.filter(p => { const s = p.querySelector("svg");
      return s.getAttribute("role") === "img" && s.ariaLabel.length > 40; }).length,
    headings: all("h1, h2, h3, h4").map(h => h.tagName),
    tables: all("table").length,
    captions: all("table > caption").filter(c => c.textContent.trim()).length,
    scopes: all("th").every(h => ["col", "row"].includes(h.scope)),
    wide: all("main *").filter(n => !n.closest(".scroll, .plot") && box(n).right > innerWidth + 1)
      .map(n => n.tagName + " " + n.textContent.slice(0, 40)),
    scrolling: all(".scroll").filter(s => s.scrollWidth > s.clientWidth).length,
    boxes: all(".scroll").every(s => box(s).right <= innerWidth && s.tabIndex === 0),
    ids: all("[id]").map(n => n.id),
    broken: all("a").filter(a => !document.querySelector(a.getAttribute("href"))).length,
    ink: getComputedStyle(name).fill, page_colour: getComputedStyle(document.body).backgroundColor,
    text: getComputedStyle(document.body).color,
  };
})()"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium")
    with open_browser(browser, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def brightness(colour: str) -> float:
    """Of `rgb(r, g, b)`: 0 black, 1 white."""
    red, green, blue = (int(part) for part in colour.strip("rgb()").split(","))
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


@pytest.mark.slow
def test_the_page_in_a_real_browser(tab: Tab, tmp_path: Path) -> None:
    """One page: folded, then whole; wide and light, dark, then a phone."""
    run = with_counters(faster(), 50_000)
    document = build_document(run, analyse(run).cells)
    blocks = [*document.lead, *(b for section in document.sections for b in section.blocks)]
    names = [block.name for block in blocks if isinstance(block, Figure)]
    page = tmp_path / "report.html"
    page.write_text(render_html(document), encoding="utf-8")

    tab.open(page, 1280)
    folded = tab.run(STATE)
    assert folded["height"] <= 6000
    assert page.stat().st_size < 1_500_000
    tab.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    light = tab.run(STATE)
    tab.scheme(dark=True)
    tab.settle()
    dark = tab.run(STATE)
    phone_size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    tab.send("Emulation.setDeviceMetricsOverride", **phone_size)
    phone = tab.run(STATE)

    assert tab.seen("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded") == []
    asked = [request["request"]["url"] for request in tab.seen("Network.requestWillBeSent")]
    assert {url for url in asked if not url.startswith("data:")} == {page.as_uri()}
    for state in (light, dark, phone):
        assert state["drawn"] == names
        assert min(state["marks"]) > 0
        assert state["clipped"] == []
        assert state["unpainted"] == 0
    assert light["named"] == len(names) == 6
    assert light["headings"] == ["H1", *["H2"] * len(document.sections)]
    assert light["tables"] == light["captions"] == sum(isinstance(b, Table) for b in blocks)
    assert light["scopes"]
    assert light["broken"] == 0
    assert len(light["ids"]) == len(set(light["ids"]))
    assert light["page"] <= 1280

    assert brightness(light["page_colour"]) > 0.9 > 0.3 > brightness(light["ink"])
    assert brightness(dark["page_colour"]) < 0.2 < 0.7 < brightness(dark["ink"])
    assert (light["ink"], dark["ink"]) == (light["text"], dark["text"])

    assert phone["page"] <= 400
    assert phone["wide"] == []
    assert phone["boxes"]
    assert phone["scrolling"] > 5
