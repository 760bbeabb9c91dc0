"""The page of the service in a real browser: drop, paste, click, keys, themes, phones."""

import json
import pathlib
import time

import pytest
from bundle import test_bundle_text
from service_cases import HOSTILE, TOKEN, indexed, png, served
from system import load_module

from dmljax.index.inputs import DEFAULT_K

_HELPER = pathlib.Path(__file__).parents[1] / "report" / "browser.py"
browser = load_module(_HELPER)

browser.require()
made = test_bundle_text.made  # a fixture: the bundle of a tiny CLIP that embeds words
pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("serve")]

_FILE = """async ([numbers, name]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(numbers)], name, {type: "image/png"}));
  return data;
}"""


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as running:
        yield running


class Visit:
    """The open page, with what the browser said about it and which hosts it asked."""

    def __init__(self, chromium, server, *, width=1200, route_fn=None):
        self.context = chromium.new_context(viewport={"width": width, "height": 900})
        self.page, self.complaints, self.urls = self.context.new_page(), [], []
        if route_fn is not None:
            self.page.route("**/*", route_fn)
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.server = server
        self.page.goto(server.url)

    def _hear(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def __enter__(self):
        self.page.wait_for_selector("html[data-ready]", timeout=20_000)
        return self

    def __exit__(self, *error):
        if error[0] is None:
            assert self.complaints == []
            assert all(u.startswith((self.server.url, "blob:", "data:")) for u in self.urls)
            self.check_width()
        self.context.close()

    def check_width(self):
        widths = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] == widths[1], "the page scrolls sideways"

    def until(self, expression):
        """Waits until an expression is true; the page forbids the `eval` of Playwright."""
        end = time.monotonic() + 20
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.03)

    def hits(self, count):
        """Ids of the hits, when there are so many and their pictures are drawn."""
        self.until(
            f"document.querySelectorAll('#hits li').length === {count}"
            " && [...document.querySelectorAll('#hits img')].every((x) => x.naturalWidth > 0)"
        )
        return self.page.locator("#hits .id").all_text_contents()

    def transfer(self, number):
        return self.page.evaluate_handle(_FILE, [list(png(number)), f"{number}.png"])


def test_distances_are_shown_as_distances(chromium, distance_server, tmp_path):
    with Visit(chromium, distance_server) as visit:
        (tmp_path / "photo.png").write_bytes(png(5))
        visit.page.set_input_files("#file", tmp_path / "photo.png")
        visit.hits(DEFAULT_K)
        texts = visit.page.locator("#hits .similarity").all_text_contents()
        assert texts[0] == "distance 0.0000" and visit.page.locator("#hits progress").count() == 0
        distances = [float(text.removeprefix("distance ")) for text in texts]
        assert distances == sorted(distances)


def test_choose_drop_and_paste_find_the_same_as_the_service(chromium, server, tmp_path):
    def expected(number):
        hits = server.request("POST", f"/search?k={DEFAULT_K}", png(number)).json["results"][0][
            "hits"
        ]
        return [hit["id"] for hit in hits]

    with Visit(chromium, server) as visit:
        page = visit.page
        (tmp_path / "photo.png").write_bytes(png(5))
        page.set_input_files("#file", tmp_path / "photo.png")
        assert visit.hits(DEFAULT_K) == expected(5)
        assert page.locator("#hits .similarity").first.text_content() == "1.0000"
        page.dispatch_event("#drop", "drop", {"dataTransfer": visit.transfer(6)})
        visit.until("document.querySelector('#hits .id').textContent === 'cats/06.png'")
        assert visit.hits(DEFAULT_K) == expected(6)
        data = visit.transfer(7)
        page.evaluate(
            "(data) => document.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data}))",
            data,
        )
        visit.until("document.querySelector('#hits .id').textContent === 'cats/07.png'")
        assert visit.hits(DEFAULT_K) == expected(7)


def test_words_find_the_same_as_the_service(chromium, server, made, tmp_path):
    place = indexed(made[0], tmp_path, count=8)
    with served(tmp_path, made[0], f"--index={place}") as of_words:
        body = {"texts": ["a red shoe"], "k": 5}
        expected = of_words.request("POST", "/search", body).json["results"][0]["hits"]
        with Visit(chromium, of_words) as visit:
            page = visit.page
            visit.until("!document.getElementById('bytext').hidden")
            page.fill("#words", "  ")
            page.keyboard.press("Enter")
            assert not page.locator("#found").is_visible()  # spaces ask for nothing
            page.fill("#k", "5")
            page.fill("#words", " a red shoe ")
            page.keyboard.press("Enter")
            assert visit.hits(5) == [hit["id"] for hit in expected]
            assert page.locator("#found-title").text_content() == "Most similar to these words"
            assert page.locator("#what").text_content() == "a red shoe"
            assert not page.locator("#query").is_visible()
            page.fill("#k", "3")
            page.keyboard.press("Tab")
            assert visit.hits(3) == [hit["id"] for hit in expected[:3]]  # the words are kept
    with Visit(chromium, server) as visit:  # a bundle that compares images only
        visit.until("document.getElementById('facts').textContent !== ''")
        assert not visit.page.locator("#words").is_visible()


def test_stored_items_clicks_keys_and_bad_files(chromium, server, tmp_path):
    def title_ends_with(text):
        visit.until(
            f"document.getElementById('found-title').textContent.endsWith({json.dumps(text)})"
        )

    with Visit(chromium, server) as visit:
        page = visit.page
        page.fill("#name", "cats/03.png")
        page.keyboard.press("Enter")
        first = visit.hits(DEFAULT_K)[0]
        page.locator("#hits button").first.focus()
        page.keyboard.press("Enter")
        title_ends_with(first)
        assert first not in visit.hits(DEFAULT_K)
        page.fill("#k", "500")
        page.keyboard.press("Tab")
        visit.hits(19)  # as many as there are
        page.locator("#samples button").nth(2).click()
        third = page.locator("#samples .id").nth(2).text_content()
        title_ends_with(third)
        assert third not in visit.hits(19)
        page.fill("#name", "cats/01.png")
        page.locator("#byid button").first.click()
        title_ends_with("cats/01.png")
        visit.hits(19)
        assert HOSTILE in "".join(page.locator("#hits .metadata").all_text_contents())
        assert page.title() == "Find similar images"
        (tmp_path / "a.png").write_bytes(b"no image")
        page.set_input_files("#file", tmp_path / "a.png")
        page.wait_for_selector("#status.bad")
        assert "image" in page.text_content("#status")
        assert any("415" in complaint for complaint in visit.complaints)
        visit.complaints.clear()  # Chromium reports the status by itself
        page.evaluate(
            "() => { const o = document.createElement('option'); o.value = '1'; "
            "document.getElementById('threshold').append(o); "
            "document.getElementById('threshold').value = '1'; }"
        )
        page.fill("#name", "cats/01.png")
        page.keyboard.press("Enter")
        title_ends_with("No match")
        assert page.locator("#hits li").count() == 0


def test_phones_and_both_themes(chromium, server, request):
    colors = set()
    with Visit(chromium, server, width=390) as visit:
        page = visit.page
        page.locator("#samples button").first.click()
        visit.hits(DEFAULT_K)
        for width, scheme in ((390, "light"), (390, "dark"), (320, "dark"), (1200, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            if folder := request.config.getoption("--screenshots", default=None):
                path = pathlib.Path(folder) / f"serve-{width}-{scheme}.png"
                page.screenshot(path=path, full_page=True)
            colors.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            visit.check_width()
    assert len(colors) == 2


def test_the_page_asks_for_a_token(chromium, server):
    """A route of the browser stands for a service that has one."""

    def answer(route):
        has_token = route.request.headers.get("authorization") == f"Bearer {TOKEN}"
        is_page = route.request.url == f"{server.url}/"
        route.continue_() if has_token or is_page else route.fulfill(status=401, json={"error": ""})

    visit = Visit(chromium, server, route_fn=answer)
    visit.page.wait_for_selector("#login:not([hidden])")
    for token, status in (("wrong-wrong-wrong-wrong", 401), (TOKEN, 200)):
        visit.page.fill("#token", token)
        with visit.page.expect_response("**/info") as response:
            visit.page.keyboard.press("Enter")
        assert response.value.status == status
    with visit:
        visit.page.locator("#samples button").first.click()
        visit.hits(DEFAULT_K)
        assert all("401" in complaint for complaint in visit.complaints)
        visit.complaints.clear()
