"""Every route of a real process: answers, refusals, and what a client may never see."""

import base64
import concurrent.futures
import contextlib
import io
import json
import shutil
import signal
import socket
import sqlite3
import time
import zlib

import forged
import msgpack
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save
from service_cases import TOKEN, indexed, png, refused, served

from dmljax import bundle as bundles
from dmljax import index as indexes

pytestmark = pytest.mark.xdist_group("serve")
MSGPACK = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}


@pytest.fixture(scope="module")
def model(bundle_folder):
    return bundles.load(bundle_folder)


def _text(data):
    return base64.b64encode(data).decode()


def _multipart(parts):
    """A body of files, and its headers."""
    lines = []
    for name, filename, data in parts:
        file = f'; filename="{filename}"' if filename else ""
        head = f'--line\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        lines.append(head.encode() + data + b"\r\n")
    return b"".join(lines) + b"--line--\r\n", {"Content-Type": "multipart/form-data; boundary=line"}


def test_embeddings_in_every_format_are_those_of_the_bundle(server, model):
    images = [png(i) for i in range(3)]
    expected = model.embed(images)
    one = server.request("POST", "/embed", images[0])
    assert one.status == 200 and one.json["model"] == model.digest
    np.testing.assert_allclose(one.json["embeddings"], expected[:1], atol=1e-6)
    many = server.request("POST", "/embed", {"images": [_text(image) for image in images]})
    np.testing.assert_allclose(many.json["embeddings"], expected, atol=1e-6)
    packed = server.request("POST", "/embed", msgpack.packb({"images": images}), headers=MSGPACK)
    data = msgpack.unpackb(packed.body)["embeddings"]
    np.testing.assert_allclose(np.frombuffer(data, "<f4").reshape(3, -1), expected, atol=1e-6)
    body, headers = _multipart([("a", f"{i}.png", image) for i, image in enumerate(images)])
    accept = {"Accept": "application/octet-stream"}
    raw = server.request("POST", "/embed", body, headers=headers | accept)
    assert raw.headers["X-Shape"] == f"3,{model.dimension}"
    np.testing.assert_allclose(np.frombuffer(raw.body, "<f4").reshape(3, -1), expected, atol=1e-6)


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
    body = msgpack.packb({"vectors": vector.tobytes(), "k": 5})
    packed = msgpack.unpackb(server.request("POST", "/search", body, headers=MSGPACK).body)
    assert [hit["id"] for hit in packed["results"][0]["hits"]] == [name for name, _ in expected]
    by_id = server.request("GET", "/search?id=cats/04.png&k=3").json["results"][0]["hits"]
    assert [hit["id"] for hit in by_id] == neighbors
    content = {"vectors": vector.tolist(), "k": 5, "where": {"number": {"<": 7}}, "exact": True}
    hits = server.request("POST", "/search", content).json["results"][0]["hits"]
    assert [hit["id"] for hit in hits] == some
    answer = server.request("GET", "/search?id=cats/04.png&k=9&threshold=1").json
    assert answer["k"] == 9 > len(answer["results"][0]["hits"]) and answer["exact"]
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


def test_a_bundle_without_unit_vectors_is_searched_by_distance(distance_bundle, distance_server):
    model = bundles.load(distance_bundle)
    stored = model.embed([png(i) for i in range(20)]).astype(float)
    query = model.embed([png(100)])
    distances = np.sqrt(((stored - query) ** 2).sum(axis=1))
    assert distance_server.request("GET", "/info").json["similarity"] == "euclidean"
    hits = distance_server.request("POST", "/search?k=5", png(100)).json["results"][0]["hits"]
    assert [hit["id"] for hit in hits] == [f"cats/{i:02d}.png" for i in np.argsort(distances)[:5]]
    np.testing.assert_allclose([-hit["similarity"] for hit in hits], np.sort(distances)[:5], 1e-4)
    middle = -float(np.sort(distances)[2:4].mean())
    content = {"vectors": query.tolist(), "k": 10, "threshold": middle}
    near = distance_server.request("POST", "/search", content).json["results"][0]
    assert [hit["id"] for hit in near["hits"]] == [hit["id"] for hit in hits[:3]]
    refused = distance_server.request("POST", "/search", content | {"threshold": 0.5})
    assert refused.status == 422 and "-0.5" in refused.json["error"]


def test_items_pictures_and_facts(server, model):
    item = server.request("GET", "/items?id=cats/03.png&vectors=true").json["items"][0]
    np.testing.assert_allclose(item["vector"], model.embed([png(3)])[0], atol=1e-6)
    listed = server.request("GET", "/items?limit=7").json["items"]
    assert len({item["id"] for item in listed}) == 7
    picture = server.request("GET", "/items/image?id=cats/03.png")
    assert picture.headers["Content-Type"] == "image/jpeg" and picture.body[:2] == b"\xff\xd8"
    for name in ("../photos.index/index.json", "/etc/passwd", "cats/../../x", "%00", "cats"):
        assert server.request("GET", f"/items/image?id={name}").status == 404
    info = server.request("GET", "/info").json
    assert info["index"]["items"] == 20 and info["add"] is False
    assert info["index"]["damaged"] == 0
    assert info["thresholds"] == model.thresholds
    assert info["false_match_rates"] == {"fmr=1e-2": 0.013}


def test_probes_figures_and_description(server):
    assert server.request("GET", "/healthz").json == {"status": "alive"}
    assert server.request("GET", "/readyz").json == {"status": "ready"}
    server.request("GET", "/a/route/of/a/stranger")
    figures = server.request("GET", "/metrics").body.decode()
    assert "dmljax_index_items 20.0" in figures and "dmljax_ready 1.0" in figures
    assert 'dmljax_requests_total{method="GET",route="other",status="404"}' in figures
    assert "stranger" not in figures
    description = server.request("GET", "/openapi.json").json
    options = {
        option["name"]: option for option in description["paths"]["/items"]["get"]["parameters"]
    }
    assert set(options) == {"id", "limit", "seed", "vectors"} and not options["id"]["required"]
    fields = description["components"]["schemas"]["SearchRequest"]["properties"]
    assert {"images", "vectors", "ids", "k", "threshold", "where"} <= set(fields)
    for path, operations in description["paths"].items():
        for method in operations:
            status = server.request(method.upper(), path).status
            assert status not in (404, 405) or path in ("/items/image",), (method, path)


def test_the_page_has_a_policy_and_no_other_host(server):
    page = server.request("GET", "/")
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'; img-src 'self' blob: data:;")
    assert "unsafe" not in policy
    assert b"http://" not in page.body and b"https://" not in page.body


_HEADER = b"IHDR" + (100_000).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
BOMB = (
    b"\x89PNG\r\n\x1a\n\0\0\0\r"
    + _HEADER
    + zlib.crc32(_HEADER).to_bytes(4, "big")
    + b"\0\0\0\0IDAT"
    + zlib.crc32(b"IDAT").to_bytes(4, "big")
)
JSON_HEADER = {"Content-Type": "application/json"}
D = 4  # dimensions of the tiny net


def _refusals():
    """Requests, the status of the answer, and a part of its line."""
    unit = [1.0] + [0.0] * (D - 1)
    v = {"vectors": [unit]}
    good, cut = (base64.b64encode(data).decode() for data in (png(0), png(0)[:-40]))
    return [
        ("POST", "/embed", b"", 400, "zero bytes"),
        ("POST", "/embed", b"some text", 415, "no image"),
        ("POST", "/embed", b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "no image"),
        ("POST", "/embed", png(0)[:-40], 400, "cannot be read"),
        ("POST", "/embed", {"images": [good, good, cut]}, 400, "image number 2: the image cannot"),
        ("POST", "/embed", BOMB, 413, "too"),
        ("POST", "/embed?k=1", png(0), 400, "unknown"),
        ("POST", "/embed", {"images": []}, 400, "list"),
        ("POST", "/embed", {"images": ["%%"]}, 400, "base64"),
        ("POST", "/embed", {"images": ["AAAA"] * 65}, 413, "limit is 64"),
        ("POST", "/embed", {"image": "AAAA"}, 400, "possible: images"),
        ("POST", "/embed", [1], 400, "Expected an object, got a list"),
        ("POST", "/search", {}, 400, "one of"),
        ("POST", "/search", v | {"ids": ["a"]}, 400, "one of"),
        ("POST", "/search", v | {"k": 0}, 422, "choose 1 to"),
        ("POST", "/search", v | {"k": -1}, 422, "choose 1 to"),
        ("POST", "/search", v | {"k": 21}, 422, "choose k=1 to 20"),
        ("POST", "/search", v | {"k": 1001}, 422, "1000"),
        ("POST", "/search", v | {"k": True}, 422, "whole number"),
        ("POST", "/search", v | {"k": "3"}, 422, "whole number"),
        ("POST", "/search", v | {"where": {"color": 1}}, 422, "no item has the field"),
        ("POST", "/search", v | {"where": {"\ud800": 1}}, 422, "no filter can name"),
        ("POST", "/search", v | {"where": [1]}, 422, "not an object of fields"),
        ("POST", "/search", v | {"threshold": 2}, 422, "between -1 and 1"),
        ("POST", "/search", v | {"threshold": "fmr=2"}, 422, "neither"),
        ("POST", "/search", v | {"exact": 1}, 400, "true or false"),
        ("POST", "/search", {"vectors": [[*unit, 0.0]]}, 422, "numbers"),
        ("POST", "/search", {"vectors": [[2.0] + [0.0] * (D - 1)]}, 422, "length 2"),
        ("POST", "/search", {"vectors": [[0.0] * D]}, 422, "is zero"),
        ("POST", "/search", {"vectors": [["a"] * D]}, 422, "a number, got text"),
        ("POST", "/search", {"vectors": [unit] * 257}, 413, "limit is 256"),
        ("POST", "/search", b'{"vectors": [[NaN, 0, 0, 0]]}', 400, "NaN"),
        ("POST", "/search", b'{"vectors": [[1e999, 0, 0, 0]]}', 422, "infinity"),
        ("POST", "/search", b"[" * 100_000, 400, "not JSON"),
        ("POST", "/search", b'{"ids": ["\\ud800"]}', 422, "surrogate"),
        ("POST", "/search", b"\xff\xfe", 400, "UTF-8"),
        ("POST", "/search", {"ids": ["a\0b"]}, 422, "control character"),
        ("POST", "/search", {"ids": ["x" * 600]}, 422, "512 bytes"),
        ("POST", "/search", {"ids": ["../../etc/passwd"]}, 404, "no item has the id"),
        ("GET", "/search", None, 400, "id is missing"),
        ("GET", "/search?id=cats/01.png&k=1&k=2", None, 400, "twice"),
        ("GET", "/items?limit=101", None, 422, "choose 1 to 100"),
        ("GET", "/items?limit=-1", None, 400, "whole number"),
        ("POST", "/items", {"items": []}, 403, "--allow-add"),
        ("DELETE", "/items?id=cats/01.png", None, 403, "--allow-delete"),
        ("PUT", "/items", b"", 405, "GET, POST, DELETE"),
        ("GET", "/embed", None, 405, "POST"),
        ("PURGE", "/embed", None, 405, "POST"),
        ("GET", "/../../etc/passwd", None, 404, "no such route"),
    ]


@pytest.mark.parametrize("case", _refusals(), ids=lambda case: f"{case[0]}-{case[1]}-{case[4]}")
def test_bad_requests_are_refused_in_one_line(server, case):
    method, path, body, status, text = case
    is_json = path.startswith("/search") and isinstance(body, bytes)
    answer = server.request(method, path, body, headers=JSON_HEADER if is_json else None)
    assert answer.status == status, answer.body
    assert text in answer.json["error"] and "\n" not in answer.json["error"]
    assert answer.json["request_id"] == answer.headers["X-Request-Id"]


def test_request_ids_are_taken_over_if_they_are_harmless(server):
    name = "client-17.a_b"
    assert (
        server.request("GET", "/info", headers={"X-Request-Id": name}).headers["X-Request-Id"]
        == name
    )
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


def test_parts_of_multipart_are_limited(server):
    many, headers = _multipart([("a", "a.png", b"x")] * 1000)
    assert server.request("POST", "/embed", many, headers=headers).status == 413
    body, headers = _multipart([("a", None, b"x")] * 3)
    assert "no file name" in server.request("POST", "/embed", body, headers=headers).json["error"]
    body, headers = _multipart([("a", None, b"x")] * 40)
    assert server.request("POST", "/embed", body, headers=headers).status == 400
    cut = {"Content-Type": "multipart/form-data"}
    assert "boundary" in server.request("POST", "/embed", b"x", headers=cut).json["error"]


def _raw(server, data, *, seconds=10):
    """What the service answers to bytes, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        connection.sendall(data)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


def test_large_and_slow_requests_end(server):
    head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\n"
    assert b" 413 " in _raw(server, head + b"Content-Length: 99999999999\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        try:
            for _ in range(40):
                connection.sendall(chunk)
        except OSError:
            pass  # closed by the service
        connection.settimeout(5)
        try:
            answer = connection.recv(1000)
        except ConnectionError:
            answer = b" 413 "  # the answer was lost with the unread bytes
    assert b" 413 " in answer
    start = time.monotonic()
    assert b" 408 " in _raw(server, head + b"Content-Length: 100\r\nConnection: close\r\n\r\nabc")
    assert _raw(server, b"POST /embed HTTP/1.1\r\nHost: loc") == b""
    assert time.monotonic() - start < 15
    # A connection that is kept has the same time for its second head.
    start = time.monotonic()
    ask = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert _raw(server, ask + b"GET /healthz HTTP/1.1\r\nHo").count(b"HTTP/1.1 200") == 1
    assert time.monotonic() - start < 8
    # Empty lines before a head do not keep a connection open.
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(ask)
        start = time.monotonic()
        with pytest.raises(OSError):
            for _ in range(40):
                time.sleep(0.2)
                connection.sendall(b"\r\n")
        assert 1 < time.monotonic() - start < 6
    assert server.request("GET", "/readyz").status == 200


def test_what_is_no_request_is_refused_in_one_line(server):
    head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\n"
    large = b"X: " + b"y" * 100_000
    for data, text in (
        (head + large, "larger than 32768 bytes"),
        (head + b"X: y\r\n" * 20_000, "larger than 32768 bytes"),
        (b"nonsense\r\n\r\n", "no request"),
        (b"BREW /embed HTTP/1.1\r\nHost: localhost\r\n\r\n", "no request"),
        (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", "no request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "no request"),  # TLS
    ):
        answer = _raw(server, data)
        assert answer.startswith(b"HTTP/1.1 400 "), data[:60]
        assert text in json.loads(answer.partition(b"\r\n\r\n")[2])["error"], data[:60]
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n")
        time.sleep(0.2)
        connection.sendall(large)  # a trailer
        assert b" 400 " in connection.recv(1000)


@pytest.mark.parametrize(
    ("head", "answer"),
    [
        (b"X: " + b"y" * 40_000, b"HTTP/1.1 400 "),
        (b"Content-Length: 99000000\r\n\r\n" + b"y" * 40_000, b"HTTP/1.1 413 "),
    ],
    ids=["head", "body"],
)
def test_a_client_that_goes_on_sending_can_read_why_it_was_refused(server, head, answer):
    """A connection that is closed while something is unread is reset, and the answer is lost."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST /embed HTTP/1.1\r\nHost: localhost\r\n" + head)
        for _ in range(4):
            time.sleep(0.2)
            connection.sendall(b"y" * 1_000_000)
        start = time.monotonic()
        assert connection.recv(1000).startswith(answer)
        while connection.recv(1000):
            pass
        assert time.monotonic() - start < 1  # the end of the answer is told at once
        time.sleep(3)
        with pytest.raises(OSError):
            for _ in range(10):
                time.sleep(0.1)
                connection.sendall(b"y")


def test_requests_of_one_packet_are_answered_in_their_order(server, model):
    """Pipelining, with trailers after a body that is sent in chunks."""
    bodies = [png(1), png(2)]
    chunk = b"%x\r\n%b\r\n0\r\nX-Trailer: y\r\n\r\n" % (len(bodies[1]), bodies[1])
    head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nAccept: application/octet-stream\r\n"
    plain = head + b"Content-Length: %d\r\n\r\n" % len(bodies[0]) + bodies[0]
    last = head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk
    unread, rows = _raw(server, plain + last), []
    while unread:
        answer_head, _, unread = unread.partition(b"\r\n\r\n")
        assert answer_head.startswith(b"HTTP/1.1 200 OK") and b"x-trailer" not in answer_head
        rows.append(np.frombuffer(unread[: 4 * model.dimension], "<f4"))
        unread = unread[4 * model.dimension :]
    np.testing.assert_allclose(rows, model.embed(bodies), atol=1e-6)


def test_images_of_every_size_are_embedded_as_by_the_bundle(server, model):
    """Small ones are decoded with the request, larger ones by other threads."""
    images = [png(i, side) for i, side in enumerate((8, 100, 129, 700))]
    rng = np.random.default_rng(0)
    for side, kind in ((128, "PNG"), (60, "BMP"), (300, "JPEG")):
        file = io.BytesIO()
        pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, kind)
        images.append(file.getvalue())
    expected = model.embed(images)
    accept = {"Accept": "application/octet-stream"}
    one_by_one = [server.request("POST", "/embed", x, headers=accept).body for x in images]
    rows = [np.frombuffer(body, "<f4") for body in one_by_one]
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    together = server.request("POST", "/embed", {"images": [_text(x) for x in images]})
    np.testing.assert_allclose(together.json["embeddings"], expected, atol=1e-6)


def test_many_clients_share_batches(server, model):
    images = [png(i) for i in range(60)]
    expected = model.embed(images)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda image: server.request("POST", "/embed", image), images))
    rows = [answer.json["embeddings"][0] for answer in answers]
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    figures = server.request("GET", "/metrics").body.decode()
    counts = {
        name: float(line.rpartition(" ")[2])
        for line in figures.splitlines()
        for name in ("dmljax_batch_images_count", "dmljax_batch_images_sum")
        if line.startswith(name)
    }
    assert counts["dmljax_batch_images_count"] < counts["dmljax_batch_images_sum"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--host=0.0.0.0",), "needs --token-file"),
        (("--allow-add",), "--allow-add needs --token-file"),
        (("--allow-delete",), "--allow-delete needs --token-file"),
        (("--port=70000",), "between 0 and 65535"),
        (("--token-file=/nowhere/token.txt",), "--token-file=/nowhere/token.txt cannot be read"),
        (("--drain-seconds=-1",), "--drain-seconds=-1 must be 0 or larger"),
        (("--watch=nan",), "--watch=nan must be larger than 0"),
        (("--body-seconds=inf",), "--body-seconds=inf must be larger than 0, and finite"),
        (("--max-body-bytes=0",), "--max-body-bytes=0 must be larger than 0"),
    ],
)
def test_an_unsafe_service_does_not_start(bundle_folder, index_folder, words, text):
    assert text in refused(bundle_folder, f"--index={index_folder}", *words)


def test_tokens_adding_deleting_and_the_end(bundle_folder, token_file, tmp_path, model):
    place = indexed(bundle_folder, tmp_path, 5)
    words = (bundle_folder, f"--index={place}", f"--token-file={token_file}", "--allow-add")
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    words += ("--allow-delete", "--host=0.0.0.0", "--max-body-bytes=100000", "--max-items=2")
    with served(tmp_path, *words) as server:
        for path in ("/info", "/items", "/metrics", "/search?id=cats/01.png", "/items/image?id=x"):
            assert server.request("GET", path).status == 401
            for wrong in (f"Bearer {TOKEN}x", f"Basic {TOKEN}"):
                answer = server.request("GET", path, headers={"Authorization": wrong})
                assert answer.status == 401
        for path in ("/", "/healthz", "/readyz", "/openapi.json"):
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
            ({"id": "x", "vector": ["a"] * D}, 422, "a number"),
            ({"id": "x", "vector": [1.0]}, 422, f"{D} numbers"),
            ({"id": "x", "metadata": [1]} | image, 422, "metadata"),
            ({"id": 1} | image, 422, "id"),
            (image, 422, "id is missing"),
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
            server.process.send_signal(signal.SIGTERM)
            connection.sendall(body[50:])
            answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200")
        assert server.process.wait(20) in (0, -signal.SIGTERM)
        assert "Traceback" not in server.log()
    with indexes.open(place) as index:
        assert index.contains(["new", "cats/01.png"]) == [True, False]


def test_a_new_index_and_a_new_bundle_are_taken_over(bundle_folder, tmp_path, model):
    place = indexed(bundle_folder, tmp_path / "one", 6)
    other = indexed(bundle_folder, tmp_path / "two", 9)
    bundle = tmp_path / "used.bundle"
    evil = shutil.copytree(bundle_folder, tmp_path / "evil.bundle")
    unsized = shutil.copytree(bundle_folder, tmp_path / "unsized.bundle")
    bundle.symlink_to(bundle_folder)
    with served(tmp_path, bundle, f"--index={place}", "--watch=0.2") as server:
        ends, problems = [], []

        def load():
            while not ends:
                answer = server.request("POST", "/search", png(1))
                if answer.status != 200:
                    problems.append(answer.body)

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for _ in range(3):
                pool.submit(load)
            try:
                _until(lambda: _items(server) == 6)
                place.rename(tmp_path / "old.index")
                other.rename(place)
                _until(lambda: _items(server) == 9)
                assert _figure(server, "ok") >= 1
                # A bundle that does not fit: the present one stays.
                damaged = tmp_path / "damaged.bundle"
                damaged.mkdir()
                (damaged / "manifest.json").write_text("{}")
                _point(bundle, damaged)
                _until(lambda: _figure(server, "failed") >= 1)
                # A bundle whose program would overwrite the memory of the service.
                forged.replace(evil, "embed.jaxexport", forged.lapack_program(bundle_folder))
                _point(bundle, evil)
                _until(lambda: "calls 'lapack_sgetrf_ffi'" in server.log())
                assert _items(server) == 9
                # Examples without a size: an error that nobody foresaw is one line, once.
                golden = load_file(unsized / "golden.safetensors")
                golden["inputs"] = np.array(1, np.uint8)
                forged.replace(unsized, "golden.safetensors", save(golden))
                failed = _figure(server, "failed")
                _point(bundle, unsized)
                _until(lambda: "TypeError: len() of unsized object" in server.log())
                time.sleep(1)
                assert _figure(server, "failed") == failed + 1
                assert "Traceback" not in server.log() and _items(server) == 9
                _point(bundle, bundle_folder)
                server.process.send_signal(signal.SIGHUP)
                _until(lambda: _figure(server, "ok") >= 2)
                switches = server.log().count(" is in use")
                assert switches == _figure(server, "ok")
            finally:
                ends.append(True)
        assert not problems
        assert server.request("GET", "/info").json["model"] == model.digest


def test_a_changed_item_is_found_before_somebody_asks_for_it(bundle_folder, model, tmp_path):
    place = indexed(bundle_folder, tmp_path, count=5)
    with contextlib.closing(sqlite3.connect(place / "generation-1" / "items.db")) as connection:
        connection.execute("update items set metadata = '{}' where row = 4")
        connection.commit()
    with served(tmp_path, bundle_folder, f"--index={place}") as server:
        _until(lambda: server.request("GET", "/info").json["index"]["verified"] == 5)
        assert server.request("GET", "/info").json["index"]["damaged"] == 1
        assert "item 'cats/03.png' (row 4) was changed" in server.log()
        answer = server.request("GET", "/items?id=cats/03.png")
        assert answer.status == 503 and "cats/03.png" in server.log()
        assert server.request("GET", "/items?id=cats/02.png").status == 200


def _point(link, target):
    new = link.with_name("new")
    new.symlink_to(target)
    new.rename(link)


def _items(server):
    return server.request("GET", "/info").json["index"]["items"]


def _figure(server, result):
    figures = server.request("GET", "/metrics").body.decode()
    name = f'dmljax_reloads_total{{result="{result}"}} '
    return next(float(x[len(name) :]) for x in figures.splitlines() if x.startswith(name))


def _until(fn):
    for _ in range(600):
        if fn():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen within a minute")


def _mutated(rng, count):
    """Requests made from those that are refused, and from good ones, with changed bytes."""
    unit = [1.0] + [0.0] * (D - 1)
    good = [
        ("POST", "/embed", png(0), {}),
        ("POST", "/search?k=2&threshold=0.1", png(1), {}),
        ("POST", "/search", json.dumps({"vectors": [unit], "k": 3}).encode(), JSON_HEADER),
        ("POST", "/embed", msgpack.packb({"images": [png(2)]}), MSGPACK),
        ("POST", "/embed", *_multipart([("a", "a.png", png(3))])),
        ("GET", "/items?id=cats/01.png", b"", {}),
        ("GET", "/search?id=cats/01.png&where={}", b"", {}),
    ]
    for method, path, body, *_ in _refusals():
        headers = JSON_HEADER if isinstance(body, dict | list) else {}
        data = json.dumps(body).encode() if headers else (body or b"")
        good.append((method, path, data, headers))
    for _ in range(count):
        method, path, body, headers = good[rng.integers(len(good))]
        body, path = bytearray(body), bytearray(path.encode())
        for target in (body, path) if rng.random() < 0.3 else (body,):
            for _ in range(int(rng.integers(0, 6))):
                position = int(rng.integers(len(target) + 1))
                action = rng.integers(4)
                if action == 0 and target:
                    target[position % len(target)] = int(rng.integers(256))
                elif action == 1:
                    target[position:position] = rng.bytes(int(rng.integers(1, 9)))
                elif action == 2:
                    del target[position : position + int(rng.integers(1, 40))]
                else:
                    target[position:position] = target[:position][-40:]
        text = bytes(x for x in path if 33 <= x <= 126 or x > 160) or b"/"
        if rng.random() < 0.1:
            kinds = ("application/json", "application/msgpack", "image/png", "text/x", "\t;=")
            headers = {"Content-Type": kinds[rng.integers(len(kinds))]}
        lines = [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
        start = method.encode() + b" " + text + b" HTTP/1.1\r\nHost: localhost\r\n"
        yield start + b"Connection: close\r\n" + head + bytes(body)


def _throw(server, seed, count):
    secrets = (b"Traceback", b"dmljax/", b"/tmp", b"site-packages", b".py", b"items.db")
    refusals = lost = 0
    for data in _mutated(np.random.default_rng(seed), count):
        try:
            answer = _raw(server, data, seconds=30)
        except ConnectionError:  # closed by the service before it read all
            lost += 1
            continue
        status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
        assert 200 <= status < 500, (data[:400], answer[:600])
        refusals += status >= 400
        body = answer.partition(b"\r\n\r\n")[2] if status >= 400 else b""
        assert not any(word in body for word in secrets), (data[:400], answer[:600])
    assert refusals > count / 2 and lost < count / 20


def test_mutated_requests_are_answered_in_one_line(server):
    _throw(server, 0, 300)
    assert server.request("GET", "/readyz").status == 200
    assert "Traceback" not in server.log()


@pytest.mark.slow
def test_a_hundred_thousand_mutated_requests(server):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: _throw(server, seed, 25_000), range(1, 5)))
    assert server.request("GET", "/readyz").status == 200
    assert "Traceback" not in server.log()
