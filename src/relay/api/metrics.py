"""/metrics: what the API sees of requests, and the samples of the control plane, in Prometheus' text format.

``vllm:`` names are used only where the meaning is vLLM's; everything else is ``relay_``. Histograms are plain lists bumped on the
event loop (a token must not pay for locks) and become Prometheus families when scraped.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from relay.api.types import Usage

Sample = tuple[str, dict[str, str], float]

TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LATENCY_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histogram:
    """Counts of observations by upper bound. Not thread-safe: the event loop alone observes."""

    __slots__ = ("_bounds", "_counts", "_name", "_sum", "_text")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, labels: dict[str, str]) -> HistogramMetricFamily:
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(self._name, self._text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class ApiMetrics:
    """Everything the API counts, by model."""

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model}
        self._ttft = Histogram("vllm:time_to_first_token_seconds", "Arrival to first token of a choice.", TTFT_S)
        self._itl = Histogram("vllm:inter_token_latency_seconds", "Gap between deliveries of a choice.", ITL_S)
        self._e2e = Histogram("vllm:e2e_request_latency_seconds", "Arrival to last token of a request.", LATENCY_S)
        self._prompt = Histogram("vllm:request_prompt_tokens", "Prompt tokens of finished choices.", TOKENS)
        self._generation = Histogram("vllm:request_generation_tokens", "Generated tokens of finished choices.", TOKENS)
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated = 0
        self._finished: dict[str, int] = {"stop": 0, "length": 0}
        self._gone: dict[str, int] = {"disconnected": 0, "slow_reader": 0}
        self._responses: dict[tuple[str, int], int] = {}

    def delivered(self, gap_ns: int, first: bool, count: int) -> None:
        """``count`` tokens of one choice came ``gap_ns`` after the last ones (after the request's arrival if ``first``)."""
        (self._ttft if first else self._itl).observe(gap_ns * 1e-9)
        self._num_generated += count

    def choice_finished(self, reason: str, prompt_tokens: int, generated: int) -> None:
        self._finished[reason] = self._finished.get(reason, 0) + 1
        self._prompt.observe(prompt_tokens)
        self._generation.observe(generated)

    def request_finished(self, duration_ns: int, usage: Usage) -> None:
        self._e2e.observe(duration_ns * 1e-9)
        self._num_prompt_tokens += usage.prompt_tokens
        self._num_cached_tokens += usage.prompt_tokens_details.cached_tokens

    def client_gone(self, reason: str) -> None:
        self._gone[reason] += 1

    def responded(self, endpoint: str, status: int) -> None:
        key = (endpoint, status)
        self._responses[key] = self._responses.get(key, 0) + 1

    def families(self) -> Iterator[Metric]:
        """The API's own metrics."""
        labels = self._labels
        for histogram in (self._ttft, self._itl, self._e2e, self._prompt, self._generation):
            yield histogram.family(labels)
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens of finished requests.", self._num_prompt_tokens),
            (
                "vllm:prompt_tokens_cached",
                "Prompt tokens of finished requests not computed again.",
                self._num_cached_tokens,
            ),
            ("vllm:generation_tokens", "Tokens delivered to the API.", self._num_generated),
        ):
            counter = CounterMetricFamily(name, text, labels=list(labels))
            counter.add_metric(list(labels.values()), value)
            yield counter
        yield _counters("vllm:request_success", "Finished choices.", ("finished_reason",), labels, self._finished)
        yield _counters(
            "relay_clients_gone", "Requests whose client left or read too slowly.", ("reason",), labels, self._gone
        )
        responses = CounterMetricFamily(
            "relay_http_responses",
            "Answers by endpoint and status (499: the client left).",
            labels=["endpoint", "status"],
        )
        for (endpoint, status), count in self._responses.items():
            responses.add_metric([endpoint, str(status)], count)
        yield responses


def _counters(name: str, text: str, keys: Sequence[str], labels: dict[str, str], values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[*labels, *keys])
    for value, count in values.items():
        family.add_metric([*labels.values(), value], count)
    return family


def _control_families(samples: Iterable[Sample]) -> Iterator[Metric]:
    """Samples of the control plane as families: ``…_total`` are counters, the rest gauges. Label sets of a name must agree."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    keys: dict[str, list[str]] = {}
    for name, labels, value in samples:
        family = families.get(name)
        if family is None:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            keys[name] = sorted(labels)
            family = families[name] = kind(name, "From the control plane.", labels=keys[name])
        family.add_metric([labels.get(key, "") for key in keys[name]], value)
    return iter(families.values())


class _ApiCollector(Collector):
    def __init__(self, api: ApiMetrics, control: Callable[[], Iterable[Sample]]) -> None:
        self._api = api
        self._control = control

    def collect(self) -> Iterator[Metric]:
        yield from self._api.families()
        yield from _control_families(self._control())


class MetricsPage:
    """The registry of one app, rendered on demand."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, api: ApiMetrics, control: Callable[[], Iterable[Sample]]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_ApiCollector(api, control))

    def render(self) -> bytes:
        return generate_latest(self._registry)
