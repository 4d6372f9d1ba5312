"""Pages as a real browser shows them: all is there, nothing complains, and names of tables run no script."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch
from support.builders import Run
from support.forge import filled, save_tables
from support.pages import HOSTILE

import recckpt
from recckpt.storage import open_storage
from recckpt.text import html

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PHONE, DESK = 420, 1280  # pixels

_missing = [name for name in (CHROMIUM, DRIVER) if not shutil.which(name)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_missing), reason=f"NO PAGE IS SEEN IN A BROWSER: THERE IS NO {_missing}"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="NO PAGE IS SEEN IN A BROWSER: THERE IS NO SELENIUM")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def shown(browser, page: str, path: Path, width: int, scheme: str) -> str:
    """Show a page and return its text, once nothing has complained and nothing is wider than the screen."""
    path.write_text(page, encoding="utf-8")
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(path.as_uri())
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    light = "rgb(0, 0, 0)" if scheme == "light" else "rgb(255, 255, 255)"
    assert browser.execute_script("return getComputedStyle(document.querySelector('.recckpt')).color") == light
    return browser.execute_script("return document.body.innerText")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    run = Run(path, max_keep=None).train(20)
    run.model.items.insert(torch.tensor([7]), torch.full((1, 4), float("nan")))
    run.saver.save("ckpt_21")
    return path


@pytest.mark.parametrize(("width", "scheme"), [(DESK, "light"), (PHONE, "dark")])
def test_a_report_and_a_diff_say_what_they_must(browser, run, tmp_path, width, scheme):
    report = shown(browser, recckpt.report(run).to_html(), tmp_path / "report.html", width, scheme)
    order = [
        "1 problem",
        "Metrics",
        "sparse_lr_0",
        "What needs attention",
        "NaN or infinity in embedding",
        "recckpt diff",
        "Checkpoints",
    ]
    order += [
        "ckpt_10",
        "ckpt_20",
        "How tables and checkpoints grow",
        "The last 3 saves",
        "pause of training",
        "bytes written",
    ]
    order += ["Tables of ckpt_21", "never trained", "norms of embeddings", "largest norms, by id"]
    places = [report.find(each) for each in order]
    assert -1 not in places
    assert places == sorted(places)
    plots = browser.execute_script("return [...document.querySelectorAll('svg')].map(each => each.clientWidth)")
    assert len(plots) == 8
    assert all(200 < wide <= width for wide in plots)
    diff = shown(browser, recckpt.diff(run / "ckpt_10", run).to_html(), tmp_path / "diff.html", width, scheme)
    assert all(each in diff for each in ("different: 2 tables", "Embeddings that moved most", "user/1"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_that_goes_on_beyond_an_edge_of_the_screen_has_a_shadow_there(browser, tmp_path, scheme):
    image = pytest.importorskip("PIL.Image")
    page = html.page("wide", html.body("wide", [html.table(["A", "B"], [["x" * 20, "y" * 60]] * 9, {"A", "B"})], ""))
    shown(browser, page, tmp_path / "wide.html", PHONE, scheme)
    scroll = browser.find_element("css selector", ".scroll")

    def edges() -> list[bool]:
        with image.open(io.BytesIO(scroll.screenshot_as_png)) as taken:
            row, y = taken.convert("L"), taken.height - 5  # between the text and the line below
            middle = row.getpixel((taken.width // 2, y))
            return [abs(row.getpixel((x, y)) - middle) > 30 for x in (0, taken.width - 1)]

    found = [edges()]
    browser.execute_script("arguments[0].scrollLeft = 99999", scroll)
    assert [*found, edges()] == [[False, True], [True, False]]


def test_names_of_tables_run_no_script(browser, tmp_path):
    storage = open_storage(str(tmp_path / "run"))
    storage.prepare()
    names = [*HOSTILE, "<img src=x onerror=document.title='run'>", "</style><svg onload=document.title='run'>"]
    for number in (1, 2):
        tables = [filled(name, range(5 * number), slots={"sparse_<b>": ()}) for name in names]
        save_tables(storage, tables, ckpt_id=f"<script>{number}", step=number)
    saver = recckpt.Saver(torch.nn.ModuleList(tables), output_dir=str(tmp_path / "own"))
    pages = {
        "report": recckpt.report(tmp_path / "run").to_html(),
        "diff": recckpt.diff(tmp_path / "run/latest~1", tmp_path / "run").to_html(),
        "reader": html.page("a reader", recckpt.CheckpointReader(tmp_path / "run")._repr_html_()),
        "load": html.page("a load", saver.load(str(tmp_path / "run"))._repr_html_()),
    }
    for name, page in pages.items():
        text = shown(browser, page, tmp_path / f"{name}.html", PHONE, "light")
        assert all(each in text for each in (HOSTILE[0], *names[-2:], "`ü" * 20))
        assert browser.title != "run"
        assert browser.execute_script("return document.querySelectorAll('script, img, b').length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_notebook_the_text_has_the_colour_of_the_notebook_whatever_that_of_the_system(
    browser, run, tmp_path, scheme
):
    shown_by = recckpt.CheckpointReader(run / "ckpt_10")._repr_html_()
    cell = f'<body style="background: white; color: rgb(1, 2, 3)">{shown_by}</body>'
    (tmp_path / "cell.html").write_text(cell, encoding="utf-8")
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.get((tmp_path / "cell.html").as_uri())
    colour = "return getComputedStyle(document.querySelector('.recckpt td')).color"
    assert browser.execute_script(colour) == "rgb(1, 2, 3)"


# What Jupyter Lab, in its own and in saved notebooks, has for tables and headings of outputs.
LAB = """
.lab h1, .lab h2, .lab h3 { line-height: 1; font-weight: 500; margin: 0 0 .5em; }
.lab td, .lab th, .lab tr { vertical-align: middle; padding: .5em; line-height: normal; white-space: normal;
  max-width: none; border: none; }
.lab:not(.markdown) td, .lab:not(.markdown) th, .lab:not(.markdown) tr { text-align: right; }
.lab table { margin-left: auto; margin-bottom: 1em; }
"""
LOOKS = """
return [...document.querySelectorAll('.recckpt')].map(shown => [...shown.querySelectorAll('*')].map(each => {
  const look = getComputedStyle(each);
  const names = ['textAlign', 'verticalAlign', 'minWidth', 'maxWidth', 'opacity', 'fontSize', 'lineHeight'];
  return [each.tagName, each.className, ...names.map(name => look[name]), look.margin, look.padding].join(' ');
}));
"""


def test_many_pages_in_one_notebook_look_as_each_does_alone_whatever_the_notebook_has_for_tables(
    browser, run, tmp_path
):
    saver = recckpt.Saver(torch.nn.ModuleList([filled("item", [], shape=4)]), output_dir=str(tmp_path / "own"))
    bodies = [
        each._repr_html_()
        for each in (
            recckpt.CheckpointReader(run / "ckpt_10"),
            recckpt.report(run),
            recckpt.diff(run / "ckpt_10", run),
            saver.plan([{"path": str(run)}]),
        )
    ]

    def looks(*cells: str) -> list[list[str]]:
        (tmp_path / "notebook.html").write_text(
            f'<meta charset="utf-8"><style>{LAB}</style>{"".join(f"<div class=lab>{cell}</div>" for cell in cells)}',
            encoding="utf-8",
        )
        browser.get((tmp_path / "notebook.html").as_uri())
        return browser.execute_script(LOOKS)

    screen = {"width": DESK, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    alone = [looks(each)[0] for each in bodies]
    assert looks(*bodies) == alone
    assert looks(*reversed(bodies)) == alone[::-1]
    cells = [line.split(" ") for shown in alone for line in shown if line.startswith(("TD ", "TH "))]
    assert {(kind == "n", align) for _, kind, align, *_ in cells} == {(True, "right"), (False, "left")}
    assert {upright for _, _, _, upright, *_ in cells} == {"top"}
