"""Every route of a real process: answers, refusals, and what a client may never see."""

import base64
import concurrent.futures
import io
import json
import signal
import socket
import time
import zlib

import numpy as np
import pytest
from fuzz.mutations import damaged
from PIL import Image
from service_cases import TOKEN, indexed, metric, png, raw, served, until

from dmljax import bundle as bundles
from dmljax import index as indexes
from dmljax.commands import serve
from dmljax.commands.parser import Parser
from dmljax.serve.pictures import Pictures
from dmljax.serve.settings import read_tokens

pytestmark = pytest.mark.xdist_group("serve")
JSON_HEADER = {"Content-Type": "application/json"}
D = 4  # dimensions of the tiny net


@pytest.fixture(scope="module")
def model(bundle_folder):
    return bundles.load(bundle_folder)


def _text(data):
    return base64.b64encode(data).decode()


def _images():
    """Returns small and large images in several formats."""
    images = [png(i, side) for i, side in enumerate((8, 100, 129, 700, 2100))]
    rng = np.random.default_rng(0)
    for side, kind in ((128, "PNG"), (60, "BMP"), (300, "JPEG")):
        file = io.BytesIO()
        pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, kind)
        images.append(file.getvalue())
    return images


def test_embeddings_are_those_of_the_bundle(server, model):
    images = _images()
    expected = model.embed(images)
    answers = [server.request("POST", "/embed", image) for image in images]
    assert {answer.json["model"] for answer in answers} == {model.digest}
    rows = [answer.json["embeddings"][0] for answer in answers]
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    together = server.request("POST", "/embed", {"images": [_text(x) for x in images]})
    np.testing.assert_allclose(together.json["embeddings"], expected, atol=1e-6)


def test_searches_agree_with_the_index(server, model, index_folder):
    query = png(100)
    vector = model.embed([query])
    with indexes.open(index_folder) as index:
        expected = [(hit.id, hit.metadata) for hit in index.search(vector, 5)[0]]
        neighbors = [hit.id for hit in index.search_ids(["cats/04.png"], 3)[0]]
        some = [hit.id for hit in index.search(vector, 5, where={"number": {"<": 7}})[0]]
    by_image = server.request("POST", "/search?k=5", query).json["results"][0]
    assert [(hit["id"], hit["metadata"]) for hit in by_image["hits"]] == expected
    assert by_image["match"] and all(hit["picture"] for hit in by_image["hits"])
    by_vector = server.request("POST", "/search", {"vectors": vector.tolist(), "k": 5})
    assert by_vector.json["results"][0]["hits"] == by_image["hits"]
    by_id = server.request("GET", "/search?id=cats/04.png&k=3").json["results"][0]["hits"]
    assert [hit["id"] for hit in by_id] == neighbors
    content = {"vectors": vector.tolist(), "k": 5, "where": {"number": {"<": 7}}}
    hits = server.request("POST", "/search", content).json["results"][0]["hits"]
    assert [hit["id"] for hit in hits] == some
    filtered = '/search?k=5&where={"number":{"<":7}}'
    hits = server.request("POST", filtered, query).json["results"][0]["hits"]
    assert [hit["id"] for hit in hits] == some
    answer = server.request("GET", "/search?id=cats/04.png&k=9&threshold=1").json
    assert answer["k"] == 9 > len(answer["results"][0]["hits"])
    # Without k there are as many as there are, up to ten.
    assert len(server.request("POST", "/search", query).json["results"][0]["hits"]) == 10


def test_a_threshold_can_answer_that_nothing_matches(server, model):
    vector = -model.embed([png(0)])
    answer = server.request("POST", "/search", {"vectors": vector.tolist(), "threshold": 0.9999})
    assert answer.json["results"] == [{"match": False, "hits": []}]
    name, cosine = next(iter(model.thresholds.items()))
    answer = server.request("POST", f"/search?threshold={name}", png(0))
    assert answer.json["threshold"] == cosine
    assert all(hit["similarity"] >= cosine for hit in answer.json["results"][0]["hits"])


def test_a_bundle_without_unit_vectors_is_searched_by_distance(distance_server, model):
    query, stored = model.embed([png(100)]), model.embed([png(i) for i in range(20)])
    distances = np.sqrt(((stored.astype(float) - query) ** 2).sum(axis=1))
    assert distance_server.request("GET", "/info").json["similarity"] == "euclidean"
    hits = distance_server.request("POST", "/search?k=5", png(100)).json["results"][0]["hits"]
    assert [hit["id"] for hit in hits] == [f"cats/{i:02d}.png" for i in np.argsort(distances)[:5]]
    np.testing.assert_allclose([-hit["similarity"] for hit in hits], np.sort(distances)[:5], 1e-4)
    middle = -float(np.sort(distances)[2:4].mean())
    content = {"vectors": query.tolist(), "k": 10, "threshold": middle}
    near = distance_server.request("POST", "/search", content).json["results"][0]
    assert [hit["id"] for hit in near["hits"]] == [hit["id"] for hit in hits[:3]]
    refused = distance_server.request("POST", "/search", content | {"threshold": 0.5})
    assert refused.status == 422 and "-inf to 0" in refused.json["error"]


def test_items_pictures_and_facts(server, model):
    item = server.request("GET", "/items?id=cats/03.png&vectors=true").json["items"][0]
    np.testing.assert_allclose(item["vector"], model.embed([png(3)])[0], atol=1e-6)
    listed = server.request("GET", "/items?limit=7").json["items"]
    assert len({item["id"] for item in listed}) == 7 and "vector" not in listed[0]
    picture = server.request("GET", "/items/image?id=cats/03.png")
    assert picture.headers["Content-Type"] == "image/jpeg" and picture.body[:2] == b"\xff\xd8"
    for name in ("../photos.index/index.json", "/etc/passwd", "cats/../../x", "%00", "cats"):
        assert server.request("GET", f"/items/image?id={name}").status == 404
    info = server.request("GET", "/info").json
    assert info["index"]["items"] == 20 and info["add"] is False
    assert info["thresholds"] == model.thresholds
    assert info["false_match_rates"] == {"fmr=1e-2": 0.013}


def test_probes_and_metrics(server):
    for path in ("/healthz", "/readyz"):
        assert server.request("GET", path).json == {"status": "ready"}
    server.request("GET", "/a/route/of/a/stranger")
    text = server.request("GET", "/metrics").body.decode()
    assert "dmljax_index_items 20.0" in text and "stranger" not in text
    assert metric(server, 'dmljax_requests_total{method="GET",route="other",status="404"}') >= 1


def test_the_page_has_a_policy_and_no_other_host(server):
    page = server.request("GET", "/")
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'; img-src 'self' blob: data:;")
    assert "unsafe" not in policy and page.headers["X-Frame-Options"] == "DENY"
    assert b"http://" not in page.body and b"https://" not in page.body


_HEADER = b"IHDR" + (100_000).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
BOMB = (
    b"\x89PNG\r\n\x1a\n\0\0\0\r"
    + _HEADER
    + zlib.crc32(_HEADER).to_bytes(4, "big")
    + b"\0\0\0\0IDAT"
    + zlib.crc32(b"IDAT").to_bytes(4, "big")
)


def _refusals():
    """Requests, the status of the answer, and a part of its line."""
    unit = [1.0] + [0.0] * (D - 1)
    v = {"vectors": [unit]}
    good, cut = (_text(data) for data in (png(0), png(0)[:-40]))
    return [
        ("POST", "/embed", b"", 400, "zero bytes"),
        ("POST", "/embed", b"some text", 415, "image"),
        ("POST", "/embed", png(0)[:-40], 400, "cannot be read"),
        ("POST", "/embed", {"images": [good, good, cut]}, 400, "image number 2: the image cannot"),
        ("POST", "/embed", BOMB, 413, "pixels"),
        ("POST", "/embed?k=1", png(0), 400, "unknown"),
        ("POST", "/embed", {"images": ["%%"]}, 400, "base64"),
        ("POST", "/embed", {"images": ["AAAA"] * 129}, 413, "limit is 128"),
        ("POST", "/embed", {"image": "AAAA"}, 400, "possible: images"),
        ("POST", "/embed", [1], 400, "Expected `object`, got `array`"),
        ("POST", "/search", {}, 400, "one of"),
        ("POST", "/search", v | {"k": 21}, 422, "choose k=1 to 20"),
        ("POST", "/search", v | {"k": True}, 400, "Expected `int"),
        ("POST", "/search", v | {"where": {"color": 1}}, 422, "no item has the field"),
        ("POST", "/search", {"ids": [""] * 1_100_000}, 413, "1,048,576 values"),
        ("POST", "/search", v | {"threshold": "fmr=2"}, 422, "neither"),
        ("POST", "/search", {"vectors": [[*unit, 0.0]]}, 422, "pass [n, 4]"),
        ("POST", "/search", {"vectors": [unit, unit[:2]]}, 422, "not an array"),
        ("POST", "/search", {"vectors": [unit] * 129}, 413, "limit is 128"),
        ("POST", "/search", {"ids": ["a"] * 3, "k": 1000}, 413, "limit is 2,000 hits"),
        ("POST", "/search", b'{"vectors": [[NaN, 0, 0, 0]]}', 400, "JSON"),
        ("POST", "/search", b'{"vectors": [[1e999, 0, 0, 0]]}', 400, "out of range"),
        ("POST", "/search", b"[" * 100_000, 400, "Expected `object`"),
        ("POST", "/search", b'{"ids": ["a"], "where": ' + b"[" * 100_000, 400, "depth"),
        ("POST", "/search", b'{"ids": ["\\ud800"]}', 400, "truncated"),
        ("POST", "/search", {"ids": ["../../etc/passwd"]}, 404, "no item has the id"),
        ("GET", "/search", None, 400, "`id`"),
        ("GET", "/search?id=cats/01.png&k=1&k=2", None, 400, "twice"),
        ("GET", "/items?limit=101", None, 400, "<= 100"),
        ("POST", "/items", {"items": [{"id": "a", "vector": unit}]}, 403, "--allow-add"),
        ("DELETE", "/items?id=cats/01.png", None, 403, "--allow-delete"),
        ("PUT", "/items", b"", 405, "GET, POST, DELETE"),
        ("PURGE", "/embed", None, 405, "POST"),
        ("GET", "/../../etc/passwd", None, 404, "route does not exist"),
    ]


@pytest.mark.parametrize("case", _refusals(), ids=lambda case: f"{case[0]}-{case[1]}-{case[4]}")
def test_bad_requests_are_refused_in_one_line(server, case):
    method, path, body, status, text = case
    is_json = path.startswith("/search") and isinstance(body, bytes)
    answer = server.request(method, path, body, headers=JSON_HEADER if is_json else None)
    assert answer.status == status, answer.body
    assert text in answer.json["error"] and "\n" not in answer.json["error"]
    assert answer.json["request_id"] == answer.headers["X-Request-Id"]


def test_an_unknown_kind_of_body_is_refused(server):
    for kind in ("application/msgpack", "multipart/form-data; boundary=x", "text/plain"):
        answer = server.request("POST", "/embed", b"x", headers={"Content-Type": kind})
        assert answer.status == 415 and "application/json" in answer.json["error"]


def test_request_ids_are_taken_over_if_they_are_harmless(server):
    name = "client-17.a_b"
    answer = server.request("GET", "/info", headers={"X-Request-Id": name})
    assert answer.headers["X-Request-Id"] == name
    long = server.request("GET", "/info", headers={"X-Request-Id": "x" * 65})
    assert len(long.headers["X-Request-Id"]) == 16
    assert f"{name} GET /info 200" in server.log()


def test_requests_that_a_foreign_page_sends_are_refused(server):
    foreign = {"Origin": "https://evil.example"}
    assert server.request("POST", "/embed", png(0), headers=foreign).status == 403
    assert server.request("GET", "/info", headers={"Host": "evil.example"}).status == 403
    for malformed in ("null", "http://[", "evil.example", "//"):
        answer = server.request("GET", "/info", headers={"Origin": malformed})
        assert answer.status == 403 and "other sites" in answer.json["error"]
    own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    assert server.request("POST", "/embed", png(0), headers=own).status == 200
    image = {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    opened = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    framed = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
    picture, search = "/items/image?id=cats/01.png", "/search?id=cats/01.png"
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        for path in (picture, search, "/items", "/info", "/metrics"):
            for kind in (image, opened):
                headers = kind | {"Sec-Fetch-Site": site}
                assert server.request("GET", path, headers=headers).status == status, (path, site)
        headers = {"Sec-Fetch-Site": site}
        assert server.request("POST", "/embed", png(0), headers=headers).status == status
        assert server.request("GET", "/", headers=headers | opened).status == 200
        assert server.request("GET", "/", headers=headers | image).status == status
        assert server.request("GET", "/", headers=headers | framed).status == status
    assert server.request("GET", search, headers=opened | {"Sec-Fetch-Site": "none"}).status == 200
    assert "Access-Control-Allow-Origin" not in server.request("GET", "/info").headers


def test_links_out_of_the_folder_of_pictures_are_not_read(tmp_path):
    (tmp_path / "secret.png").write_bytes(b"secret")
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"picture")
    shown = Pictures(folder)
    assert shown.read("a.png") == b"picture" and "a.png" in shown and "b.png" not in shown
    (folder / "a.png").unlink()
    (folder / "a.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(ValueError, match="leads out"):
        shown.read("a.png")


def test_many_clients_share_batches(server, model):
    images = [png(i) for i in range(60)]
    expected = model.embed(images)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda image: server.request("POST", "/embed", image), images))
    rows = [answer.json["embeddings"][0] for answer in answers]
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    name = "dmljax_batch_images"
    assert metric(server, f"{name}_count") < metric(server, f"{name}_sum")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--host=0.0.0.0"], "needs --token-file"),
        (["--allow-delete", "--index=x"], "--allow-add and --allow-delete need --token-file"),
        (["--images=x"], "need --index"),
        (["--port=70000"], "between 0 and 65535"),
        (["--decoders=257"], "--decoders=257 must lie between 0 and 256"),
        (["--max-seconds=nan"], "--max-seconds=nan must be larger than 0"),
        (["--max-body-bytes=0"], "--max-body-bytes=0 must be larger than 0"),
    ],
)
def test_an_unsafe_service_does_not_start(words, text):
    parser = Parser("serve", "")
    serve.add_arguments(parser)
    with pytest.raises(ValueError, match=text):
        serve.run(parser.parse_args(["some.bundle", *words]), [])


def test_a_file_of_tokens_is_checked(tmp_path, token_file):
    assert read_tokens(None) == () and TOKEN.encode() in read_tokens(token_file)
    with pytest.raises(OSError, match="cannot be read"):
        read_tokens(tmp_path / "missing.txt")
    for data in (b"", b"short\n", b"\xff" * 20, b"a token \x07 with a bell in it\n"):
        (tmp_path / "token.txt").write_bytes(data)
        with pytest.raises(ValueError, match="must have a token in each line"):
            read_tokens(tmp_path / "token.txt")


def test_tokens_adding_deleting_and_the_end(bundle_folder, token_file, tmp_path, model):
    place = indexed(bundle_folder, tmp_path, 5)
    words = (bundle_folder, f"--index={place}", f"--token-file={token_file}", "--allow-add")
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    words += ("--allow-delete", "--host=0.0.0.0", "--max-body-bytes=100000", "--max-entries=2")
    with served(tmp_path, *words) as server:
        for path in ("/info", "/items", "/metrics", "/search?id=cats/01.png", "/items/image?id=x"):
            assert server.request("GET", path).status == 401
            for wrong in (f"Bearer {TOKEN}x", f"Basic {TOKEN}"):
                answer = server.request("GET", path, headers={"Authorization": wrong})
                assert answer.status == 401
        for path in ("/", "/healthz", "/readyz"):
            assert server.request("GET", path).status == 200
        large = {"images": ["A" * 100_000]}
        assert server.request("POST", "/embed", large, headers=bearer).status == 413
        add = {"items": [{"id": "new", "image": _text(png(50)), "metadata": {"number": 50}}]}
        assert server.request("POST", "/items", add).status == 401
        assert server.request("POST", "/items", add, headers=bearer).status == 201
        assert server.request("POST", "/items", add, headers=bearer).status == 409
        unit, image = [1.0] + [0.0] * (D - 1), {"image": _text(png(51))}
        for item, status, text in (
            ({"id": "x"}, 400, "an image or a vector"),
            ({"id": "x", "vector": unit} | image, 400, "an image or a vector"),
            ({"id": "x", "name": 1} | image, 400, "unknown field"),
            ({"id": "x", "vector": [1.0]}, 422, f"pass [n, {D}]"),
            ({"id": "x", "metadata": [1]} | image, 400, "metadata"),
            (image, 400, "`id`"),
        ):
            answer = server.request("POST", "/items", {"items": [item]}, headers=bearer)
            assert answer.status == status and text in answer.json["error"], answer.body
        assert server.request("GET", "/info", headers=bearer).json["index"]["items"] == 6
        bad = {"items": [{"id": "x", "image": _text(png(51))}, {"id": "", "image": _text(png(52))}]}
        assert server.request("POST", "/items", bad, headers=bearer).status == 422
        many = server.request("DELETE", "/items?id=a&id=b&id=c", headers=bearer)
        assert many.status == 413 and "2" in many.json["error"]
        hits = server.request("POST", "/search?k=1", png(50), headers=bearer)
        assert hits.json["results"][0]["hits"][0]["id"] == "new"
        picture = "/items/image?id=cats/01.png"
        assert server.request("GET", picture, headers=bearer).status == 200
        gone = server.request("DELETE", "/items?id=cats/01.png", headers=bearer)
        assert gone.status == 200
        assert server.request("GET", picture, headers=bearer).status == 404
        assert server.request("DELETE", "/items?id=cats/01.png", headers=bearer).status == 404
        assert server.request("GET", "/info", headers=bearer).json["index"]["items"] == 5
        # SIGTERM: a request whose body is still on its way is answered, new ones are not.
        head = f"POST /embed HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        body = png(3)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:50])
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", server.port), timeout=5)
            connection.sendall(body[50:])
            answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200")
        assert server.process.wait(20) in (0, -signal.SIGTERM)
        assert "Traceback" not in server.log()
    with indexes.open(place) as index:
        assert index.contains(["new", "cats/01.png"]) == [True, False]


def test_the_current_generation_of_an_index_is_followed(bundle_folder, tmp_path, model):
    place = indexed(bundle_folder, tmp_path, 6)
    facts = {"dimension": model.dimension, "similarity": model.similarity}
    with served(tmp_path, bundle_folder, f"--index={place}") as server:
        ends, problems = [], []

        def load():
            while not ends:
                answer = server.request("POST", "/search", png(1))
                if answer.status != 200:
                    problems.append(answer.body)

        def items():
            return server.request("GET", "/info").json["index"]["items"]

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for _ in range(3):
                pool.submit(load)
            try:
                with indexes.reindex(place, model=model.digest, **facts) as new:
                    new.add([f"new{i}" for i in range(9)], model.embed([png(i) for i in range(9)]))
                    assert items() == 6
                    new.switch()
                until(lambda: items() == 9)
                # An index of another model: the present one stays in use, and the log says why.
                with indexes.reindex(place, model="b" * 64, **facts) as other:
                    other.switch()
                until(lambda: "the present index stays in use" in server.log())
                assert items() == 9
            finally:
                ends.append(True)
        assert not problems
        assert server.log().count("stays in use") == 1


def _damaged_requests(rng, count):
    """Yields requests made from those that are refused, and from good ones, with damage."""
    images = json.dumps({"images": [_text(png(2))]})
    good = [
        ("POST", "/embed", png(0), None),
        ("POST", "/search?k=2&threshold=0.1", png(1), None),
        ("POST", "/search", json.dumps({"vectors": [[1.0, 0, 0, 0]], "k": 3}), JSON_HEADER),
        ("POST", "/embed", images, JSON_HEADER),
        ("GET", "/items?id=cats/01.png", "", None),
        ("GET", "/search?id=cats/01.png&where={}", "", None),
    ]
    for method, path, body, *_ in _refusals():
        is_json = isinstance(body, dict | list)
        good.append((method, path, json.dumps(body) if is_json else body or "", JSON_HEADER))
    bodies = [(x[2].encode() if isinstance(x[2], str) else x[2])[:900] for x in good]
    paths = [x[1].encode() for x in good]
    for _ in range(count):
        i = int(rng.integers(len(good)))
        body = damaged(bodies[i], bodies, rng)
        path = damaged(paths[i], paths, rng) if rng.random() < 0.3 else paths[i]
        path = bytes(x for x in path if 33 <= x <= 126) or b"/"
        kind = "" if good[i][3] is None else "Content-Type: application/json\r\n"
        if rng.random() < 0.1:
            kinds = ("application/json", "application/msgpack", "image/png", "text/x", "\t;=")
            kind = f"Content-Type: {kinds[rng.integers(len(kinds))]}\r\n"
        head = f"Connection: close\r\n{kind}Content-Length: {len(body)}\r\n\r\n".encode()
        start = good[i][0].encode() + b" " + path + b" HTTP/1.1\r\nHost: localhost\r\n"
        yield start + head + body


def _throw(server, seed, count):
    secrets = (b"Traceback", b"dmljax/", b"/tmp", b"site-packages", b".py", b"items.db")
    refusals = lost = 0
    for data in _damaged_requests(np.random.default_rng(seed), count):
        try:
            answer = raw(server, data, seconds=30)
        except ConnectionError:  # closed by the service before it read all
            lost += 1
            continue
        status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
        assert 200 <= status < 500, (data[:400], answer[:600])
        refusals += status >= 400
        body = answer.partition(b"\r\n\r\n")[2] if status >= 400 else b""
        assert not any(word in body for word in secrets), (data[:400], answer[:600])
    assert refusals > count / 2 and lost < count / 20


def test_damaged_requests_are_answered_in_one_line(server):
    _throw(server, 0, 150)
    assert server.request("GET", "/readyz").status == 200
    assert "Traceback" not in server.log()


@pytest.mark.slow
def test_a_hundred_thousand_damaged_requests(server):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: _throw(server, seed, 25_000), range(1, 5)))
    assert server.request("GET", "/readyz").status == 200
    assert "Traceback" not in server.log()
