"""What a server counts, in the form that Prometheus collects."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class Meters:
    """The counters of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.answers = Counter("sdopt_answers", "Answers to requests for images.", ["status"], registry=registry)
        self.waiting = Gauge("sdopt_waiting_images", "Images that wait for a call.", registry=registry)
        self.ready = Gauge("sdopt_ready", "1 while requests are taken.", registry=registry)
        self.restarts = Counter("sdopt_worker_restarts", "Workers started in the place of one.", registry=registry)
        self.queue_s = Histogram(
            "sdopt_queue_seconds", "From an image's arrival to its call.", buckets=_SECONDS, registry=registry
        )
        self._images = Counter("sdopt_images", "Images drawn.", registry=registry)
        self._calls = Histogram(
            "sdopt_call_images", "Images of one call.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=registry
        )
        self._compute_s = Histogram(
            "sdopt_compute_seconds", "Calls, from prompts to images.", buckets=_SECONDS, registry=registry
        )
        self._busy_s = Counter("sdopt_busy_seconds", "Time in calls, as this process sees it.", registry=registry)
        self._graphs = Counter("sdopt_compiled_graphs", "Graphs compiled while serving.", registry=registry)
        self._held = Gauge("sdopt_worker_memory_bytes", "Memory of the worker after its last call.", registry=registry)

    def called(self, images: int, compute_s: float, call_s: float, graphs: int, held_gib: float) -> None:
        """Counts a call of the worker."""
        self._images.inc(images)
        self._calls.observe(images)
        self._compute_s.observe(compute_s)
        self._busy_s.inc(call_s)
        self._graphs.inc(graphs)
        self._held.set(held_gib * 2**30)

    def text(self) -> bytes:
        """Returns all of them in Prometheus's text format."""
        return generate_latest(self._registry)
