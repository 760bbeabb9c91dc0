"""Metrics of the service in the text format of Prometheus. Labels have fixed sets of values."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition

CONTENT_TYPE = exposition.CONTENT_TYPE_LATEST
METHODS = ("GET", "HEAD", "POST", "DELETE")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The counters, histograms and gauges, in a registry of their own."""

    def __init__(self):
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, labels: tuple[str, ...] = (), buckets=_SECONDS):
            return Histogram(f"dmljax_{name}", text, labels, buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()):
            return Counter(f"dmljax_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str):
            return Gauge(f"dmljax_{name}", text, registry=registry)

        self._requests = counter("requests", "Requests", ("route", "method", "status"))
        self._request_seconds = histogram("request_seconds", "Time of a request", ("route",))
        self.decoder_restarts = counter("decoder_restarts", "Replaced workers that decode images")
        self.decode_seconds = histogram("decode_seconds", "Time to decode the images of a request")
        self._queue_seconds = histogram("queue_seconds", "Longest wait for the net in a batch")
        self._net_seconds = histogram("net_seconds", "Time of the net for a batch")
        self.search_seconds = histogram("search_seconds", "Time of a search of the index")
        self._batch_images = histogram("batch_images", "Images in a batch", (), _SIZES)
        self.running = gauge("running_requests", "Requests in flight")
        self.items = gauge("index_items", "Items in the index")
        self.version = gauge("index_version", "Changes of the index since its creation")

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts a request that was answered."""
        self._requests.labels(route, method, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def batch(self, length: int, queued: float, net: float) -> None:
        """Counts a batch of the net."""
        self._batch_images.observe(length)
        self._queue_seconds.observe(queued)
        self._net_seconds.observe(net)

    def text(self) -> bytes:
        """Returns all metrics as text."""
        return exposition.generate_latest(self._registry)
