"""Figures of the service in the text format of Prometheus. Labels have fixed sets of values."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition

CONTENT_TYPE = exposition.CONTENT_TYPE_LATEST
METHODS = ("GET", "HEAD", "POST", "DELETE")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The counters, histograms and gauges, in a registry of their own."""

    def __init__(self):
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, labels: tuple[str, ...] = (), buckets=_SECONDS):
            return Histogram(f"dmljax_{name}", text, labels, buckets=buckets, registry=registry)

        def gauge(name: str, text: str):
            return Gauge(f"dmljax_{name}", text, registry=registry)

        labels = ("route", "method", "status")
        self.requests = Counter("dmljax_requests", "Requests", labels, registry=registry)
        self.reloads = Counter(
            "dmljax_reloads", "New bundles and indexes taken over", ("result",), registry=registry
        )
        for result in ("ok", "failed"):
            self.reloads.labels(result)
        self.decoder_restarts = Counter(
            "dmljax_decoder_restarts", "Decoding processes that were replaced", registry=registry
        )
        self.request_seconds = histogram("request_seconds", "Time of requests", ("route",))
        self.decode_seconds = histogram("decode_seconds", "Time to decode an image")
        self.queue_seconds = histogram("queue_seconds", "Longest wait for the net in a batch")
        self.net_seconds = histogram("net_seconds", "Time of the net for a batch")
        self.search_seconds = histogram("search_seconds", "Time of a search of the index")
        self.batch_images = histogram("batch_images", "Images in a batch", (), _SIZES)
        self.running = gauge("running_requests", "Requests that are being answered")
        self.waiting_images = gauge("waiting_images", "Images and texts that wait for the net")
        self.ready = gauge("ready", "1 when requests are answered")
        self.items = gauge("index_items", "Items in the index")
        self.version = gauge("index_version", "Changes of the index since its creation")
        self.opened = gauge("index_opened_timestamp_seconds", "When the index was opened")

    def batch(self, length: int, queued: float, net: float) -> None:
        self.batch_images.observe(length)
        self.queue_seconds.observe(queued)
        self.net_seconds.observe(net)

    def text(self) -> bytes:
        return exposition.generate_latest(self.registry)
