"""The page in a real browser: it renders, sorts and filters, complains of nothing, asks for nothing, fits a phone."""

from __future__ import annotations

import pytest

from bitplan.report import write_report

from . import samples
from .browser import Browser, program

EVIL = '</script><img src="http://127.0.0.1:9/x" onerror="window.broken=1"><svg onload="window.broken=1">'
MANY = 1350


@pytest.mark.parametrize(("needed", "outcome"), [("1", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_browser_fails_where_it_is_needed_and_skips_elsewhere(monkeypatch, tmp_path, needed, outcome):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("BITPLAN_CHROMIUM", raising=False)
    monkeypatch.setenv("BITPLAN_NEEDS_BROWSER", needed)
    with pytest.raises(outcome, match="needs chromium"):
        program()


@pytest.fixture(scope="module")
def browser():
    with Browser() as result:
        yield result


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(samples.write_samples(folder), folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def look(browser, report):
    opened = []

    def show(path=report, **view):
        opened.append(browser.open(path, **view))
        return opened[-1]

    yield show
    for page in opened:
        page.close()


UNFOLD = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"  # long tables are folded
NAMES = "[...document.querySelectorAll('#decisions tbody tr')].map((row) => row.cells[0].textContent)"
OUTPUT = "document.querySelector('#decisions output').textContent"


def type_into(page, text):
    page.run(
        "(() => { const box = document.querySelector('#decisions input[type=search]');"
        f" box.value = {text!r}; box.dispatchEvent(new Event('input'));"
        " return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))); })()"
    )


def test_renders_without_a_complaint_or_a_request(look):
    page = look()
    assert page.problems == []
    assert page.requests == [page.address]
    assert page.run("document.querySelectorAll('main > section').length") == 13
    assert page.run("[...document.querySelectorAll('svg')].every((svg) => svg.getBoundingClientRect().width > 100)")
    assert page.run("document.querySelectorAll('svg').length") > 25
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"  # the style is applied


def test_the_table_filters(look):
    page = look()
    page.run(UNFOLD)
    assert len(page.run(NAMES)) == 218
    assert page.run(OUTPUT) == "218 rows"
    type_into(page, "LAYERS.3. mlp")
    assert page.run(NAMES) == [f"model.layers.3.mlp.{part}_proj.weight" for part in ("down", "gate", "up")]
    assert page.run(OUTPUT) == "3 of 218 rows"
    type_into(page, "no such tensor")
    assert page.run(NAMES) == []
    assert page.run("document.querySelector('#decisions [data-empty]').checkVisibility()")
    type_into(page, "")
    page.run(
        "(() => { const list = document.querySelector('#decisions select'); list.value = 'int8_g128';"
        " list.dispatchEvent(new Event('change')); })()"
    )
    shown = page.run("[...document.querySelectorAll('#decisions tbody tr')].map((row) => row.cells[1].textContent)")
    assert set(shown) == {"int8_g128"}
    assert 0 < len(shown) < 218
    assert page.problems == []


def test_the_table_sorts_with_the_keyboard(look):
    page = look()
    page.run(UNFOLD)
    order = page.run(NAMES)
    sizes = "[...document.querySelectorAll('#decisions tbody tr')].map((row) => Number(row.cells[4].dataset.v))"
    page.run("document.querySelectorAll('#decisions th button')[4].focus()")
    page.press("Enter", "\r")
    assert page.run("document.querySelectorAll('#decisions th')[4].ariaSort") == "descending"
    assert page.run(sizes) == sorted(page.run(sizes), reverse=True)
    page.press("Enter", "\r")
    assert page.run(sizes) == sorted(page.run(sizes))
    page.press("Enter", "\r")
    assert page.run(NAMES) == order  # back to the plan's own order
    page.run("document.querySelectorAll('#decisions th button')[0].click()")
    names = page.run(NAMES)
    assert names.index("model.layers.2.mlp.up_proj.weight") < names.index("model.layers.10.mlp.up_proj.weight")


def test_marks_and_cells_say_what_they_are(look):
    page = look()
    centre = "(() => { const e = document.querySelector(%r); e.scrollIntoView({block: 'center'});" + (
        " const r = e.getBoundingClientRect(); return [r.left + %s, r.top + %s]; })()"
    )
    page.point_at(*page.run(centre % ("#decisions rect[data-tip]", "5", "4")))
    assert page.run("document.getElementById('tip').textContent").startswith("mxfp4: 505")
    page.point_at(*page.run(centre % ("[data-heat] svg", "r.width - 18", "12")))
    message = page.run("document.getElementById('tip').textContent")
    assert message.startswith("block.0, step 2,950: sensitivity 0.")
    assert message.endswith("bf16")


def test_the_navigation_shows_every_section_of_a_wide_page(look):
    page = look(width=1280)
    assert page.run("document.querySelectorAll('nav a').length") == 12
    assert page.run("document.querySelector('nav').scrollWidth <= document.querySelector('nav').clientWidth")


@pytest.mark.parametrize(("width", "dark"), [(390, True), (320, False)])
def test_nothing_hangs_over_the_side(look, width, dark):
    page = look(width=width, height=800, dark=dark)
    page.run(UNFOLD)
    assert page.run("document.documentElement.scrollWidth") <= width
    wide = page.run(
        "[...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll') && !e.closest('svg')"
        f" && e.getBoundingClientRect().right > {width} + 1).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert wide == []


def test_light_and_dark(look):
    colours = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('h1')).color]"
    page = look()
    light = page.run(colours)
    assert least_contrast(page) > 4.5
    page = look(dark=True)
    dark = page.run(colours)
    assert least_contrast(page) > 4.5
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    assert page.run("localStorage.clear()") is None
    page.run("document.getElementById('theme').click()")
    assert page.run(colours) == light  # from auto to light, whatever the system wants
    page.run("document.getElementById('theme').click()")
    assert page.run(colours) == dark
    page.run("document.getElementById('theme').click()")
    assert page.run("document.getElementById('theme').textContent") == "Theme: auto"


def least_contrast(page):
    """Of what is read, against the card and the page. WCAG asks for 4.5."""
    return page.run(
        """(() => {
          const root = getComputedStyle(document.documentElement);
          const light = (name) => { const hex = root.getPropertyValue(name).trim();
            const part = (i) => { const v = parseInt(hex.slice(i, i + 2), 16) / 255;
              return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
            return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5); };
          const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
          return Math.min(...['--ink', '--soft', '--accent'].flatMap((ink) =>
            ['--bg', '--card'].map((paper) => ratio(light(ink), light(paper))))); })()"""
    )


def test_a_name_that_is_markup_is_a_name(look, tmp_path):
    from bitplan.plan import Choice, Plan
    from bitplan.plan.plan import Planned

    Plan({EVIL: Planned(Choice("mxfp4", EVIL), (64, 64), EVIL)}).save(tmp_path / "plan.json")
    write_report([tmp_path / "plan.json"], tmp_path / "r.html", title=EVIL)
    page = look(tmp_path / "r.html")
    assert page.run(NAMES) == [EVIL]
    assert page.run("document.title") == EVIL
    assert page.run("window.broken") is None
    assert page.run("document.images.length") == 0
    assert page.requests == [page.address]
    assert page.problems == []


def test_the_policy_stops_what_slips_through(look, report, tmp_path):
    """The page's content security policy, tried with a page whose escaping is broken on purpose."""
    broken = report.read_text().replace("</main>", f"{EVIL}<script>window.broken=2</script></main>")
    (tmp_path / "broken.html").write_text(broken)
    page = look(tmp_path / "broken.html")
    assert page.run("document.images.length") == 1
    assert page.run("window.broken") is None
    assert page.problems  # the browser says what it refused


def test_more_than_a_thousand_rows_stay_quick(look, tmp_path):
    samples.write_plan(tmp_path, layers=MANY // 9)
    write_report([tmp_path / "plan.json"], tmp_path / "r.html")
    page = look(tmp_path / "r.html")
    whole = MANY // 9 * 9 + 2
    assert page.run(OUTPUT) == f"{whole:,} rows"
    assert len(page.run(NAMES)) == 500
    taken = page.run(
        "(() => { const start = performance.now(); document.querySelectorAll('#decisions th button')[4].click();"
        " document.body.getBoundingClientRect(); return performance.now() - start; })()"
    )
    assert taken < 5000  # some 100 ms on two slow cores; the limit is for busy ones
    assert "lm_head.weight" in page.run(NAMES)[:2]  # the largest of all, and not of the rows that were shown
    type_into(page, "layers.147. up_proj")
    assert page.run(NAMES) == ["model.layers.147.mlp.up_proj.weight"]
    type_into(page, "")
    assert page.run("document.querySelector('#decisions [data-more]').textContent") == f"Show all {whole:,} rows"
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert len(page.run(NAMES)) == whole
    page.run("dispatchEvent(new Event('afterprint'))")
    assert len(page.run(NAMES)) == 500


def test_prints_every_row(look, tmp_path):
    write_report(samples.write_plan(tmp_path), tmp_path / "r.html")
    page = look(tmp_path / "r.html")
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.run("getComputedStyle(document.querySelector('.tools')).display") == "none"
    assert page.run("getComputedStyle(document.querySelector('.rows')).maxHeight") == "none"
    assert len(page.call("Page.printToPDF", printBackground=True)["data"]) > 10_000
