"""The page in a browser: complete, quiet, usable by keyboard, and never wider than its window."""

import dataclasses
import functools
import json

import browser
import numpy as np
import pytest
from page_cases import HOSTILE, clustered, colored, made, names_of, number_of

from dmljax.data.splits import Split
from dmljax.report import facts, page

browser.require()
pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

# Width, height and color scheme.
WINDOWS = ((1440, 900, "light"), (1440, 900, "dark"), (768, 1000, "light"), (390, 844, "dark"))


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as running:
        yield running


class Visit:
    """One open page, with the messages and requests of the browser."""

    def __init__(self, chromium, path, *, width=1440, height=900, scheme="light", **options):
        self.context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, **options
        )
        self.page = self.context.new_page()
        self.complaints, self.requests = [], []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = path.as_uri()
        self.page.goto(self.url)
        self.page.wait_for_selector("html[data-ready]", timeout=10_000)

    def _hear(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def evaluate(self, script, *arguments):
        return self.page.evaluate(script, *arguments)

    def settle(self):
        """Waits for two frames and the timers of the page."""
        self.page.wait_for_timeout(150)

    def check(self):
        assert self.complaints == []
        addresses = {url.split("#")[0] for url in self.requests}
        assert all(url == self.url or url.startswith(("data:", "blob:")) for url in addresses)
        assert self.evaluate("document.documentElement.dataset.ready") == "true"
        width = self.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width[0] == width[1], f"the page scrolls sideways: {width}"

    def show_everything(self):
        """Opens all details and scrolls through the page, so that everything is drawn."""
        self.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        self.evaluate(SCROLL_THROUGH)


@pytest.fixture
def visit(chromium):
    visits = []

    def open_page(path, **options):
        visits.append(Visit(chromium, path, **options))
        return visits[-1]

    yield open_page
    for opened in visits:
        opened.context.close()


VIEWS = [
    {
        "kind": "matrix",
        "title": "Attention",
        "items": np.arange(8, dtype=np.int32),
        "values": np.random.default_rng(0).random((2, 8, 8)).astype(np.float32),
        "rows": "receiver",
        "columns": "sender",
    },
    {
        "kind": "maps",
        "title": "Masks",
        "items": np.arange(3, dtype=np.int32),
        "values": np.full((3, 2, 4, 4), 90, np.int8),
        "shape": [2, 4, 4],
    },
    {
        "kind": "histograms",
        "title": "Cosines",
        "edges": np.linspace(-1, 1, 11).astype(np.float32),
        "counts": {"a": np.arange(10).astype(np.float32), "b": np.ones(10, np.float32)},
        "means": {"a": 0.25},
        "axis": "cosine",
    },
    {
        "kind": "points",
        "title": "Synthetic",
        "x": np.arange(6, dtype=np.float32),
        "y": np.arange(6, dtype=np.float32),
        "group": np.array([0, 1, 2, 0, 1, 2], np.uint16),
        "groups": 3,
        "kind_of": np.array([0, 0, 0, 1, 1, 1], np.uint8),
        "names": ["real", "synthetic"],
    },
    {"kind": "hologram", "title": "Unknown"},
]
STEPS = np.arange(0, 101, 10).astype(np.float32)
FIELDS = {
    "prefixes": {
        "widths": [16, 64, 128],
        "scores": [
            {"name": "R@1", "values": [71.3, 80.0, 81.5]},
            {"name": "MAP@R", "values": [30.0, 41.0, 42.0]},
        ],
    },
    "rule": "after step 100 (select=last)",
    "curves": {
        "loss": {"steps": STEPS, "values": np.exp(-STEPS / 50)},
        "scores": [
            {"name": "test R@1", "shown": True, "steps": STEPS, "values": STEPS * 0.8},
            {"name": "test NMI", "shown": False, "steps": STEPS, "values": STEPS * 0.7},
        ],
        "baseline": 12.5,
        "marks": [{"step": 100, "text": "step 100"}],
    },
    "run": {
        "rows": [["Seed", "0"], ["SHA-256 of the run", "ab" * 32]],
        "config": json.dumps({"steps": 100}, indent=1),
        "speed": {"steps": STEPS, "images_per_second": STEPS + 5, "note": "a note"},
    },
}


@pytest.fixture(scope="module")
def complete_facts():
    return made(items=300, classes=30, fields=FIELDS, inside_fn=lambda rows: VIEWS)


@pytest.fixture(scope="module")
def complete(tmp_path_factory, complete_facts):
    folder = tmp_path_factory.mktemp("page") / "Ordner mit Ä und 空白"
    folder.mkdir()
    return page.write(complete_facts, folder / "report.html")


@pytest.fixture(scope="module")
def shown(chromium, complete):
    """The complete page, opened once. Tests leave it as they found it."""
    opened = Visit(chromium, complete)
    yield opened
    opened.context.close()


@pytest.fixture(scope="module")
def protocol(tmp_path_factory):
    embeddings, labels = clustered()
    query = np.arange(96) // 12 % 3 == 0
    names = tuple(map(str, range(12)))
    split = Split(np.arange(96), labels, names, query=query, gallery=~query)
    content = facts.make(embeddings, split, title="protocol", read_fn=colored)
    return page.write(content, tmp_path_factory.mktemp("protocol") / "report.html")


SCROLL_THROUGH = """async () => {
  for (let top = 0; top < document.documentElement.scrollHeight; top += 0.9 * innerHeight) {
    scrollTo(0, top);
    await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
  }
}"""


def test_the_page_is_ready_quiet_and_as_wide_as_its_window(visit, complete, request):
    opened = visit(complete)
    for width, height, scheme in WINDOWS:
        opened.page.set_viewport_size({"width": width, "height": height})
        opened.page.emulate_media(color_scheme=scheme)
        opened.show_everything()
        opened.check()
        assert opened.evaluate("document.documentElement.dataset.theme") == scheme
        if folder := request.config.getoption("--screenshots"):
            opened.page.screenshot(path=f"{folder}/{width}_{scheme}.png", full_page=True)


def test_all_sections_are_there_in_their_order(shown):
    ids = shown.evaluate("[...document.querySelectorAll('main section')].map((s) => s.id)")
    assert ids == ["scores", "map", "worst", "classes", "check", "embedding", "inside", "run"]
    links = shown.evaluate("[...document.querySelectorAll('nav a')].map((a) => a.hash)")
    assert links == [f"#{i}" for i in ids]
    assert shown.page.title().startswith("arrays: R@1 ")
    headings = shown.page.locator("#inside h3").all_inner_texts()
    assert headings == [view["title"] for view in VIEWS]
    masks = shown.page.locator("#inside .maps tbody tr")
    assert masks.count() == 3 and masks.locator(".overlay canvas").count() == 6
    matrix = shown.page.locator("#inside .matrix canvas")
    assert matrix.evaluate("(c) => [c.width, c.height]") == [8, 8]
    shown.page.get_by_role("button", name="layer 2").click()
    value = f"value {VIEWS[0]['values'][1, 0, 0]:.4f}"
    assert value in shown.page.inner_text("#inside [role=status]")
    assert 'cannot draw a view of the kind "hologram"' in shown.page.inner_text("#inside")


def test_the_page_shows_the_numbers_of_the_facts(shown, complete_facts):
    for tile in complete_facts.scores["tiles"]:
        number = shown.page.inner_text(f'[data-score="{tile["name"]}"]')
        assert number == f"{100 * tile['value']:.1f}"
    prefixes = complete_facts.prefixes
    numbers = shown.page.inner_text(".prefixes").split()
    assert numbers[:5] == ["First", "numbers", *map(str, prefixes["widths"])]
    for start, score in zip((5, 9), prefixes["scores"], strict=True):
        texts = [f"{value:.1f}" for value in score["values"]]
        assert numbers[start : start + 4] == [score["name"], *texts]
    rows = shown.page.locator("#classes tbody tr")
    assert rows.count() == 30
    order = complete_facts.classes["order"]
    assert rows.nth(0).inner_text().split("\t")[0].strip() == names_of(30)[order[0]]
    assert "17" not in shown.page.inner_text("#map-count") and "300 of 300" in (
        shown.page.inner_text("#map-count")
    )
    firsts = shown.page.locator("#worst .row .note").all_inner_texts()[:10]
    worst = complete_facts.worst["order"]
    per_class, listed = {}, []
    for i in worst:
        label = complete_facts.items.labels[i]
        per_class[label] = per_class.get(label, 0) + 1
        if per_class[label] <= 3:
            listed.append(int(i))
    expected = [f"first right at {complete_facts.items.first[i]}" for i in listed[:10]]
    assert firsts == expected


READ_PIXELS = """async (nodes) => {
  const images = new Map(), results = [];
  for (const node of nodes) {
    node.scrollIntoView({block: "center"});  // pictures are drawn when they come into view
    const cell = node.querySelector(".cell");
    for (let i = 0; i < 50 && !getComputedStyle(cell).backgroundImage.startsWith("url"); i++)
      await new Promise(requestAnimationFrame);
    const box = cell.getBoundingClientRect();
    const style = getComputedStyle(cell);
    const border = parseFloat(style.borderTopWidth);
    const source = style.backgroundImage.slice(5, -2);
    if (!images.has(source)) {
      const image = new Image();
      image.src = source;
      await image.decode();
      images.set(source, image);
    }
    const image = images.get(source);
    const scale = image.width / parseFloat(style.backgroundSize);
    const [x, y] = style.backgroundPosition.split(" ").map(parseFloat);
    const middle = (box.width - 2 * border) / 2;
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 1;
    const [left, top] = [x, y].map((offset) => Math.round((middle - offset) * scale));
    const context = canvas.getContext("2d");
    context.drawImage(image, left, top, 1, 1, 0, 0, 1, 1);
    results.push([Number(node.dataset.item), [...context.getImageData(0, 0, 1, 1).data], middle]);
  }
  return results;
}"""


def test_every_cell_shows_the_picture_of_its_item(visit, complete):
    """Pictures are painted with the number of their item, which is read back from the pixels."""
    opened = visit(complete, width=390)
    thumbs = opened.page.locator("#worst .row .thumb, #scores .thumb, #check .thumb")
    shown = thumbs.evaluate_all(f"(nodes) => ({READ_PIXELS})(nodes.slice(0, 60))")
    assert len(shown) == 60
    for item, color, middle in shown:
        assert number_of(color) == item, f"item {item} shows picture {number_of(color)}"
        assert middle > 20


def test_the_panel_opens_steps_closes_and_gives_the_focus_back(shown, complete_facts):
    labels, names = complete_facts.items.labels, names_of(30)
    thumb = shown.page.locator("#worst .thumb").nth(3)
    item = int(thumb.get_attribute("data-item"))
    thumb.click()
    title = shown.page.locator("#panel-title")
    assert shown.evaluate("document.getElementById('panel').open")
    assert title.inner_text() == names[labels[item]]
    shown.page.keyboard.press("ArrowRight")
    after = int(shown.page.locator("#panel .s192").get_attribute("data-item"))
    assert after != item and title.inner_text() == names[labels[after]]
    shown.page.keyboard.press("ArrowLeft")
    assert int(shown.page.locator("#panel .s192").get_attribute("data-item")) == item
    shown.page.keyboard.press("Escape")
    assert not shown.evaluate("document.getElementById('panel').open")
    assert shown.evaluate("Number(document.activeElement.dataset.item)") == item
    shown.check()


def test_a_link_to_an_item_opens_it_and_leads_to_the_map(visit, complete):
    opened = visit(complete)
    opened.page.goto(f"{opened.url}#item=17")
    opened.page.wait_for_selector("#panel[open]")
    assert int(opened.page.locator("#panel .s192").get_attribute("data-item")) == 17
    opened.page.click("#panel-map")
    opened.settle()
    assert not opened.evaluate("document.getElementById('panel').open")
    assert opened.evaluate("document.activeElement.id") == "map-canvas"
    assert int(opened.page.locator("#map-panel .thumb").first.get_attribute("data-item")) == 17
    assert not opened.page.inner_text("#map-count").startswith("300 of")
    opened.check()


def test_the_table_of_classes_sorts_by_every_head_and_filters(shown, complete_facts):
    heads = shown.page.locator("#classes thead button")
    names = heads.all_inner_texts()
    assert names == ["Class", "Images", "R@1", "MAP@R", "Inside", "Next", "Next class", "Gap"]
    columns = {
        "Images": complete_facts.classes["count"],
        "MAP@R": complete_facts.classes["map_at_r"],
        "Inside": complete_facts.classes["inside"],
        "Next": complete_facts.classes["next_similarity"],
    }
    for k, name in enumerate(names):
        for _ in range(2):
            heads.nth(k).click()
            head = shown.page.locator("#classes thead th").nth(k)
            direction = head.get_attribute("aria-sort")
            assert direction in ("ascending", "descending")
            assert shown.page.locator("#classes th[aria-sort]").count() == 1
            if name in columns:
                cells = shown.page.locator(f"#classes tbody tr td:nth-child({k + 1})")
                numbers = [float(t.replace("−", "-")) for t in cells.all_inner_texts()]
                assert numbers == sorted(numbers, reverse=direction == "descending")
    shown.page.fill('#classes input[type="search"]', "漢字")
    rows = shown.page.locator("#classes tbody tr")
    assert rows.count() == 1 and "漢字のクラス" in rows.first.inner_text()
    shown.page.fill('#classes input[type="search"]', "")


def test_the_threshold_follows_the_slider_to_both_ends(shown, complete_facts):
    offers = complete_facts.embedding["thresholds"]
    slider = shown.page.locator("#fmr")
    slider.focus()
    for key, offer in (("Home", offers[0]), ("End", offers[-1])):
        shown.page.keyboard.press(key)
        words = shown.page.inner_text("#fmr-words")
        assert f"threshold {offer['threshold']:.3f}".replace("-", "−") in words
        assert f"1 in {round(1 / offer['fmr']):,}" in words
        assert f"{100 * offer['fnmr']:.1f} %" in words


def test_the_map_by_keyboard_and_by_wheel(visit, complete):
    opened = visit(complete)
    canvas = opened.page.locator("#map-canvas")
    canvas.scroll_into_view_if_needed()
    counter = opened.page.locator("#map-count")
    before = opened.evaluate("scrollY")
    canvas.hover()
    opened.page.mouse.wheel(0, 200)
    opened.page.wait_for_timeout(400)
    assert opened.evaluate("scrollY") > before, "a wheel without focus scrolls the page"
    assert counter.inner_text() == "300 of 300 in view"
    canvas.focus()
    for _ in range(6):
        opened.page.keyboard.press("+")
    opened.settle()
    zoomed = int(counter.inner_text().split()[0])
    assert 1 <= zoomed < 150, "zooming by key stays with the selected image"
    opened.page.keyboard.press("Escape")
    opened.settle()
    assert "No image is selected" in opened.page.inner_text("#map-panel")
    opened.page.keyboard.press("Enter")
    opened.settle()
    assert opened.page.locator("#map-panel .thumb").count() > 10
    position = opened.evaluate("scrollY")
    opened.page.mouse.wheel(0, 400)
    opened.settle()
    assert opened.evaluate("scrollY") == position
    opened.page.keyboard.press("0")
    opened.settle()
    assert counter.inner_text() == "300 of 300 in view"
    opened.check()


def test_the_map_draws_pictures_of_the_right_items(visit, complete, complete_facts):
    """Compares the color of the canvas at each item with the color of its picture."""
    opened = visit(complete)
    opened.page.locator("#map-canvas").scroll_into_view_if_needed()
    opened.page.wait_for_timeout(500)
    items = complete_facts.items
    pixel = """([x, y]) => {
      const canvas = document.getElementById("map-canvas"), box = canvas.getBoundingClientRect();
      const ratio = canvas.width / box.width;
      const at = canvas.getContext("2d").getImageData(
        Math.round(((x - 0.5) * 0.95 + 0.5) * canvas.width),
        Math.round(((y - 0.5) * 0.95 + 0.5) * canvas.height), 1, 1);
      return [...at.data];
    }"""
    right = 0
    for i in range(0, 300, 7):
        place = [items.x[i] / 65535, 1 - items.y[i] / 65535]
        right += number_of(opened.evaluate(pixel, place)) == i
    assert right >= 12  # the others lie under later pictures


def test_a_keyboard_alone_reaches_every_control(visit, protocol):
    opened = visit(protocol)
    wanted = opened.evaluate(
        """[...document.querySelectorAll("button, input, summary, canvas[tabindex], a[href]")]
           .filter((n) => n.checkVisibility() && !n.disabled && !n.closest("dialog"))
           .map((n, k) => { n.dataset.stop = k; return k; }).length"""
    )
    opened.evaluate(
        """document.activeElement.blur(); window.reached = new Set();
        addEventListener("focusin", (e) => window.reached.add(e.target.dataset.stop));"""
    )
    count = "[...window.reached].filter((stop) => stop !== undefined).length"
    for _ in range(0, wanted + 60, 20):
        for _ in range(20):
            opened.page.keyboard.press("Tab")
        if opened.evaluate(count) == wanted:
            break
    assert opened.evaluate(count) == wanted


def test_hostile_names_are_text(shown):
    assert shown.page.locator("img").count() == 0
    assert HOSTILE in shown.page.inner_text("#classes")
    assert shown.page.locator("#classes b b").count() == 0
    assert shown.evaluate("window.alerted === undefined")
    shown.check()


def test_the_theme_button_overrides_the_system(visit, complete):
    opened = visit(complete, scheme="dark")
    button = opened.page.locator("#theme")
    assert button.inner_text() == "Light"
    button.click()
    assert opened.evaluate("document.documentElement.dataset.theme") == "light"
    assert (
        opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )


def test_without_javascript_the_scores_are_readable(visit, chromium, complete, complete_facts):
    context = chromium.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(complete.as_uri())
    text = opened.inner_text("noscript")
    context.close()
    assert complete_facts.summary in text


def _flat():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 2)).astype(np.float32)
    return facts.make(x, np.arange(96) % 12, title="flat", read_fn=colored)


def _unreadable():
    embeddings, labels = clustered()
    embeddings[[3, 50]] = np.nan
    return facts.make(embeddings, labels, title="unreadable", read_fn=colored)


def _broken_section():
    def fails(rows):
        raise RuntimeError("no masks here")

    return made(inside_fn=fails)


# Facts with missing parts, and texts that must (True) or must not (False) be on the page. Sizes are
# those of other pages, whose programs are compiled.
DEGRADED = {
    "two classes": (functools.partial(made, classes=2), {"taken for": False, "No range": True}),
    "one class": (functools.partial(made, classes=1), {"Confused classes": False}),
    "only lone queries": (functools.partial(made, classes=96), {"Worst queries": False}),
    "250 classes": (
        functools.partial(made, items=300, classes=250),
        {"the first 200 of 250 classes": True},
    ),
    "flat": (_flat, {"the map is the embedding itself": True, "Spectrum\n": False}),
    "no images": (functools.partial(made, read_fn=None), {"Pictures": False}),
    "unreadable": (_unreadable, {"2 images could not be read": True}),
    "a broken section": (_broken_section, {"RuntimeError: no masks here": True}),
}


@pytest.mark.parametrize("name", DEGRADED)
def test_a_page_with_less_to_show_shows_that(visit, tmp_path, name):
    make, expectations = DEGRADED[name]
    opened = visit(page.write(make(), tmp_path / "report.html"), width=390, height=800)
    opened.show_everything()
    opened.check()
    text = opened.page.inner_text("main")
    for words, is_expected in expectations.items():
        assert (words in text) == is_expected, words


def test_counts_of_neighbors_come_from_the_facts(visit, complete_facts, tmp_path):
    changed = dataclasses.replace(complete_facts, neighbors=77, shown_neighbors=3)
    opened = visit(page.write(changed, tmp_path / "report.html"))
    row = opened.page.locator("#worst .row").first
    assert row.locator(".thumb").count() == 5  # the query, three neighbors, the first right image
    assert "77 nearest" in opened.page.locator("#run details").last.text_content()


def test_roles_are_marked_on_the_pictures(visit, protocol):
    opened = visit(protocol, width=390, height=800)
    opened.check()
    corners = opened.page.locator("#worst .row").first.locator(".corner").all_inner_texts()
    assert corners[0] == "Q" and set(corners[1:]) == {"G"}
    assert "gallery images" in opened.page.inner_text("main")


def test_axe_finds_nothing(visit, complete):
    source = browser.axe_source()
    if source is None:
        pytest.skip(f"DMLJAX_AXE names no package of axe-core {browser.AXE_VERSION}")
    opened = visit(complete)
    opened.evaluate(source)
    run = "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'best-practice']})"
    for scheme, width in (("dark", 1440), ("light", 390)):
        opened.page.set_viewport_size({"width": width, "height": 900})
        opened.page.emulate_media(color_scheme=scheme)
        opened.show_everything()
        for state in ("page", "panel"):
            if state == "panel":
                opened.page.locator("#worst .thumb").first.click()
            found = [
                (v["id"], v["impact"], [node["target"] for node in v["nodes"]][:3])
                for v in opened.evaluate(run)["violations"]
            ]
            assert found == [], (state, scheme)
        opened.page.keyboard.press("Escape")


def test_sixty_thousand_points_are_ready_soon(visit, tmp_path):
    n, classes, rng = 60_502, 11_316, np.random.default_rng(0)
    small = made(items=300, classes=30, read_fn=None)
    columns = {name: x for name, x in vars(small.items).items() if x is not None}
    items = {name: np.resize(x, (n, *x.shape[1:])) for name, x in columns.items()}
    items["labels"] = rng.integers(0, classes, n).astype(np.uint16)
    items["neighbors"] = rng.integers(0, n, (n, 10)).astype(np.uint32)
    items["x"], items["y"] = rng.integers(0, 65535, (2, n)).astype(np.uint16)
    table = {name: np.resize(x, classes) for name, x in small.classes.items()}
    large = dataclasses.replace(
        small,
        items=facts.Items(**items),
        names=[f"a class of some length {c}" for c in range(classes)],
        worst={"order": np.flatnonzero(items["hits"] == 0).astype(np.uint32)},
        classes=table | {"order": rng.permutation(classes).astype(np.uint32)},
        confusions=None,
        check=None,
        looks=(),
    )
    path = page.write(large, tmp_path / "report.html")
    assert path.stat().st_size < 5e6  # random neighbors do not compress
    opened = visit(path)
    milliseconds = opened.evaluate("performance.now()")
    assert milliseconds < 6000, "1.5 s on an idle machine"
    opened.check()
    assert opened.evaluate("document.querySelectorAll('*').length") < 8000
