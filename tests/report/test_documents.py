"""report.md and report.html: what they must say, and that nothing in a run can break them."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from report_runs import gpu_run
from synthetic_run import change_batches, document_of, make_run, summarised, with_header, with_parts

from nwor_bench.records.facts import to_json
from nwor_bench.records.types import Verdict
from nwor_bench.report.document import (
    Bullets,
    Code,
    Definitions,
    Document,
    Headline,
    Paragraph,
    Section,
    table,
)
from nwor_bench.report.html import CSS, render_html
from nwor_bench.report.markdown import escape, render_markdown
from nwor_bench.report.run_report import limits
from nwor_bench.report.text import NOT_MEASURED

pytestmark = pytest.mark.slow  # whole runs


VOID = {"meta", "link"}
TRAFFIC = "Bytes: predicted and measured"


class Page(HTMLParser):
    """Collects tags and text, and insists that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def markdown(run) -> str:
    return render_markdown(document_of(run))


def page(run) -> str:
    return render_html(document_of(run))


def section(text: str, title: str) -> str:
    """What stands under one Markdown heading."""
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def run():
    return make_run()


@pytest.fixture(scope="module")
def shown(run) -> str:
    """The run's page."""
    return page(run)


def test_every_verdict_and_the_dash_are_in_the_glossary(run):
    (entries,) = document_of(run).sections[-1].blocks
    terms = ", ".join(term for term, _ in entries.entries)
    assert [name for name in (*Verdict, NOT_MEASURED) if name not in terms] == []


def test_counters_that_disagree_are_said_to(run):
    assert "NO |" not in section(markdown(run), "Evidence")
    modes = ("stage", "off", 2)
    text = section(markdown(change_batches(
        run, lambda b: (b.nwor_mode, b.scv_mode, b.block) == modes, vllm_accepted_tokens=1,
    )), "Evidence")  # fmt: skip
    assert re.search(r"stage x off\s*\| accepted tokens .* NO \|", text)
    assert "accepted tokens in the window records, but 1 in vLLM" in text


@pytest.mark.parametrize(("cache", "wide"), [("auto", 1), ("fp8", 2)])
def test_predicted_bytes_are_those_of_the_byte_model_by_hand(cache, wide):
    """By reference the commit reads activations, first tokens too: twice an fp8 cache's bytes."""
    run = with_header(gpu_run(), "engine", kv_cache_dtype=cache)
    cell = next(cell for cell in summarised(run) if cell.label == "stage x graph")
    drafts, kept = (n / cell.windows for n in (cell.nwor_total_staged, cell.nwor_total_committed))
    row = run.header.engine.bytes_per_token
    written, read = (kept - drafts) * row, (kept + 2) * row * wide
    rows = [line for line in section(markdown(run), TRAFFIC).splitlines()
            if line.startswith("| stage x graph ")]  # fmt: skip
    values = [value.strip() for value in rows[0].split("|")]
    assert values[-2] == f"+{read / 1000:,.1f} kB"
    assert values[-3] == f"-{-written / 1000:,.1f} kB"


def test_sampling_and_unequal_work_are_limits(run):
    def timed(b):
        return b.nwor_mode == "stage" and b.phase == "timed"

    odd = change_batches(run, timed, output_tokens=100, temperature=0.7)
    for shown, said in ((odd, True), (run, False)):
        text = " ".join(limits(shown, summarised(shown)))
        for words in ("unequal work", "temperature above 0"):
            assert (words in text) is said


def test_the_page_is_sound_and_loads_nothing(shown):
    assert "<script" not in shown
    assert len(shown) < 1_500_000
    found = Page(shown)
    assert "img" not in found.tags
    addresses = re.findall(r"""(?:src|href)=["']?([^"'>]*)""", shown)
    assert {address for address in addresses if not address.startswith("#")} == {"data:,"}
    assert not re.search(r"url\((?!#)|@import|https?:", shown)
    assert found.tags.count("figure") == 3
    used = set(re.findall(r"var\((--[a-z]+)\)", shown.split("</style>")[1]))
    assert len(used) >= 3
    assert used <= set(re.findall(r"(--[a-z]+):", CSS))


def test_tables_and_headings_can_be_found_without_eyes(shown):
    tables = re.findall(r"<table.*?</table>", shown, re.DOTALL)
    assert len(tables) > 10
    for each in tables:
        start = r'<table[^>]*><caption><span>[^<]+</span></caption><thead><tr><th scope="col"'
        assert re.match(start, each)
        assert each.count('<th scope="row"') == each.count("<tr>") - 1
    assert [tag for tag in Page(shown).tags if re.fullmatch(r"h\d", tag)] == ["h1"] + ["h2"] * 10
    anchors = re.findall(r'<a href="#([^"]+)"', shown)
    assert anchors == re.findall(r'<h2 id="([^"]+)"', shown)
    for alternative in re.findall(r'role="img" aria-label="([^"]*)"', shown):
        assert re.search(r"\d", alternative)


def test_the_page_says_what_the_markdown_says(run, shown):
    plain = markdown(run).replace("\\", "")
    words = set(re.findall(r"[A-Za-z]{4,}|\d[\d,.]+\d", plain))
    text = " ".join(Page(shown).text)
    missing = {word for word in words if word not in text}
    assert missing == set()


def columns_of(text: str) -> list[set[int]]:
    """How many columns the lines of each Markdown table have."""
    return [{len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]  # fmt: skip


NASTY = '<script>alert(1)</script> | `x` ](http://a) **b** &lt; "q" _c_'


def nasty(run):
    """A run whose every free text is hostile."""
    bad = with_parts(
        replace(run, warnings=(NASTY,)),
        command=NASTY,
        environment={NASTY: NASTY},
        scenario={"name": NASTY},
        blocks=[{**to_json(block), "prompt_ids": [NASTY]} for block in run.header.blocks],
    )
    return change_batches(
        bad,
        lambda b: (b.nwor_mode, b.scv_mode) == ("stage", "graph"),
        fallbacks={NASTY: 3},
        first_mismatch=NASTY,
        parity="INVALID",
    )


@given(text=st.text())
def test_escaped_text_is_one_line_that_unescapes_to_itself(text):
    escaped = escape(text)
    assert "\n" not in escaped
    assert not re.search(r"(?<!\\)(?:\\\\)*[|<>`]", escaped)
    plain = re.sub(r"\\(.)", r"\1", escaped).replace("&amp;", "&")
    assert plain == " ".join(text.split())


@examples(30)
@given(text=st.text(min_size=1))
def test_any_text_gives_a_sound_page(text):
    blocks = (Headline(text, text, "none"), Paragraph(text), Bullets((text,)), Code(text),
              Definitions(((text, text),)), table([text], [[text]], caption="c"))  # fmt: skip
    found = Page(render_html(Document(text, (), (Section(text, blocks),))))
    expected = ["html", "head", "meta", "meta", "link", "title", "style", "body", "main", "h1"]
    expected += [
        "h2",
        "p",
        "span",
        "p",
        "ul",
        "li",
        "div",
        "pre",
        "button",
        "dl",
        "dt",
        "dd",
        "div",
        "table",
    ]
    expected += ["caption", "span", "thead", "tr", "th", "tbody", "tr", "th"]
    assert found.tags == expected


@given(text=st.text(alphabet="`a \n", min_size=1))
def test_code_cannot_leave_its_fence(text):
    rendered = render_markdown(Document("t", (Code(text),), ()))
    first, *body = rendered.split("\n")[2:]
    assert set(first) == {"`"}
    assert [line for line in body if line.strip().startswith(first)] == [first]


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="1 values under 2 headers"):
        table(["a", "b"], [["1"]])


def test_hostile_text_stays_text(run, shown):
    bad = nasty(run)
    html = page(bad)
    assert "<script" not in html
    found = Page(html)
    assert NASTY.replace("`", "") in " ".join(found.text)
    assert "`" not in re.sub(r"<(pre|svg).*?</\1>", "", html, flags=re.DOTALL)
    assert set(found.tags) == {*Page(shown).tags, "strong"}  # that of the warning
    outside = re.sub(r"^```\n.*?\n```$", "", markdown(bad), flags=re.MULTILINE | re.DOTALL)
    for mark in ("`", "<script", "](http"):
        assert mark not in outside.replace("\\" + mark, "")
    for text in (outside, markdown(run)):
        assert {len(counts) for counts in columns_of(text)} == {1}


def test_rows_without_a_number_are_folded_unless_they_tell_of_a_fault():
    rows = [["1", "FASTER", "1.2", "5"], ["2", "AMBIGUOUS", NOT_MEASURED, "0"],
            ["3", "AMBIGUOUS", NOT_MEASURED, "0"], ["4", "INVALID", NOT_MEASURED, "0"]]  # fmt: skip
    page = render_html(Document("t", (table(["k", "Verdict", "Ratio", "n"], rows, 2),)))
    whole, folded = page.split("<details><summary>2 rows were not measured</summary>")
    assert [f'<th scope="row">{k}</th>' in whole for k in "1234"] == [True, False, False, True]
    assert [f'<th scope="row">{k}</th>' in folded for k in "1234"] == [False, True, True, False]
    few = [[*row[:3], "2"] for row in rows]
    made = table(["k", "Verdict", "Ratio", "n"], few, 2)
    for shown, folds in ((made, False), (replace(made, result=2), True)):
        assert ("<details>" in render_html(Document("t", (shown,)))) is folds
    one = render_html(Document("t", (table(["k", "Verdict", "Ratio", "n"], rows[:2], 2),)))
    assert "<details>" not in one
