from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from itertools import starmap
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import yaml
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from penstock.api.metrics import BOUNDS, Figures, Traffic
from penstock.api.operation import Operation
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import (
    Activity,
    EngineApi,
    EngineStatus,
    JobCounts,
    Limit,
    LimitUse,
    LimitView,
    PoolView,
    WaitCount,
    WorkerView,
)
from penstock.ports.store import Durability
from penstock.testing.aio import run_async
from penstock.workloads.pipes.status import FACT, NodeView, PipesView, PipeView

STATUS = EngineStatus(
    version="1.2.3",
    pid=1,
    started_at=1_700_000_000.0,
    durability=Durability.DISK,
    data_dir="/secret/place",
    rules="abc123",
    tally={JobState.SUCCEEDED: 7, JobState.RUNNING: 2},
    waiting=4,
    held=2,
    retried=5,
    workers=1,
    finished=9,
    awaiting_approval=3,
)


NODES = PipesView(
    pipes=(PipeView(model="duet", num_layers=4, complete=True),),
    nodes=(
        NodeView(
            node_id="n1",
            address="h:1",
            state="ready",
            jobs=2,
            tokens_per_s=12.5,
            busy=0.5,
            cache_used=10,
            cache_total=100,
        ),
    ),
)


async def nothing(call: Any) -> Any:
    raise AssertionError


GET = Operation("GET", "/v1/jobs/{job_id}", nothing, summary="Get a job")


def a_worker(pool: str = "default", status: str = "ready", slots: int = 4) -> WorkerView:
    return WorkerView(
        worker_id="w",
        pool=pool,
        topics=(),
        slots=slots,
        limit=8,
        held=1,
        labels={},
        host="h",
        pid=1,
        local=False,
        status=status,
        silent_for=0.0,
        facts={
            "paused": {"job.llm.m": "no memory"},
            "models": {
                "job.llm.m": {"state": "ill", "cause": "no memory", "first_token_ms": 250.0}
            },
            "tokens": {"job.llm.m": {"prompt": 5, "completion": 7}},
            "usage": {"a": {"peak_memory_bytes": 100}, "b": {"cpu_seconds": 1.5}},
            "runs": {"shop": {"runs": {"PARTIAL": 1}, "items": {"ok": 3, "failed": 1}}},
            FACT: msgspec.to_builtins(NODES),
        },
    )


def a_pool(name: str = "default", *, paused: bool = False) -> PoolView:
    return PoolView(
        name=name, topics=(), capacity=None, held=5, workers=1, labels={}, paused=paused
    )


def figures(**fields: Any) -> Figures:
    given: dict[str, Any] = {
        "status": STATUS,
        "workers": [],
        "pools": [],
        "limits": [],
        "counts": JobCounts({}, {"job.a": {JobState.SCHEDULED: 3}}),
        "traffic": Traffic(),
    }
    return Figures(**{**given, **fields})


def whole() -> Figures:
    """With a sample of every metric."""
    traffic = Traffic()
    traffic.count(GET, 200, 0.1)
    return figures(
        status=replace(STATUS, activity=Activity(failures={"EXCEPTION": 1})),
        workers=[a_worker()],
        pools=[a_pool()],
        limits=[LimitView(Limit(name="l"), (LimitUse((), 1, 1),))],
        traffic=traffic,
    )


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def told(scrape: Figures) -> Samples:
    """What a Prometheus server would read."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(scrape.text().decode())
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_tokens_of_models_and_containers_are_told() -> None:
    samples = told(figures(workers=[a_worker(), a_worker()]))
    tokens = "penstock_model_tokens_total"
    assert value(samples, tokens, topic="job.llm.m", kind="prompt") == 10
    assert value(samples, tokens, topic="job.llm.m", kind="completion") == 14
    assert value(samples, "penstock_model_first_token_seconds", topic="job.llm.m") == 0.25
    assert value(samples, "penstock_containers", worker="w") == 2
    assert value(samples, "penstock_container_memory_bytes", worker="w") == 100


def test_runs_items_and_nodes_are_told() -> None:
    samples = told(figures(workers=[a_worker(), a_worker()]))
    runs, items = "penstock_pipeline_runs_total", "penstock_pipeline_items_total"
    assert value(samples, runs, pipeline="shop", status="PARTIAL") == 2
    assert value(samples, items, pipeline="shop", outcome="ok") == 6
    assert value(samples, items, pipeline="shop", outcome="failed") == 2
    assert value(samples, "penstock_pipe_complete", model="duet") == 1
    assert value(samples, "penstock_nodes", state="ready") == 1
    assert value(samples, "penstock_node_jobs", node="n1") == 2
    assert value(samples, "penstock_node_tokens_per_second", node="n1") == 12.5
    assert value(samples, "penstock_node_busy_ratio", node="n1") == 0.5
    assert value(samples, "penstock_node_cache_used_bytes", node="n1") == 10
    assert value(samples, "penstock_node_cache_size_bytes", node="n1") == 100


def test_jobs_are_counted_by_state_and_every_state_is_told() -> None:
    samples = told(figures())
    assert value(samples, "penstock_jobs", state="SUCCEEDED") == 7
    assert value(samples, "penstock_jobs", state="FAILED") == 0
    assert sum(name == "penstock_jobs" for name, _ in samples) == len(JobState)
    assert value(samples, "penstock_jobs_retried") == 5
    assert value(samples, "penstock_jobs_waiting") == 4
    assert value(samples, "penstock_jobs_awaiting_approval") == 3
    assert value(samples, "penstock_jobs_held") == 2


def test_what_happened_since_the_start_is_counted() -> None:
    activity = Activity(
        submitted=9,
        started=5,
        retried=2,
        ended={JobState.SUCCEEDED: 4, JobState.FAILED: 1},
        failures={"EXCEPTION": 3},
        waits=tuple(starmap(WaitCount, ((0.001, 2), (0.008, 1), (0.011314, 1), (5e6, 1)))),
        waited=12.5,
    )
    samples = told(figures(status=replace(STATUS, activity=activity)))
    assert value(samples, "penstock_jobs_submitted_total") == 9
    assert value(samples, "penstock_jobs_started_total") == 5
    assert value(samples, "penstock_jobs_retries_total") == 2
    assert value(samples, "penstock_jobs_ended_total", state="SUCCEEDED") == 4
    assert value(samples, "penstock_jobs_ended_total", state="DENIED") == 0
    assert value(samples, "penstock_job_failures_total", code="EXCEPTION") == 3
    for le, count in {"0.002": 2, "0.008": 3, "0.032": 4, "+Inf": 5}.items():
        assert value(samples, "penstock_job_wait_seconds_bucket", le=le) == count
    assert value(samples, "penstock_job_wait_seconds_sum") == 12.5
    assert value(samples, "penstock_topic_jobs", topic="job.a", state="SCHEDULED") == 3


def test_dashboard_and_alerts_name_metrics_that_there_are() -> None:
    names = {name for name, _ in told(whole())} | {"up"}
    folder = Path(__file__).parents[2] / "deploy" / "monitoring"
    board = json.loads((folder / "grafana-dashboard.json").read_text())
    alerts = yaml.safe_load((folder / "alerts.yaml").read_text())
    asked = [one["expr"] for panel in board["panels"] for one in panel["targets"]]
    asked += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    used = {name for expression in asked for name in re.findall(r"penstock_\w+", expression)}
    assert len(used) > 15
    assert used - names == set()


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        why = "promtool is not installed (tests/support/install.sh installs it)"
        if os.environ.get("CI"):
            pytest.fail(f"in CI it must be there: {why}")
        pytest.skip(why)
    return found


def test_names_units_and_helps_follow_the_conventions_of_prometheus(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "check", "metrics"], input=whole().text(), capture_output=True, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_prometheus_takes_the_alert_rules(promtool: str) -> None:
    rules = Path(__file__).parents[2] / "deploy" / "monitoring" / "alerts.yaml"
    command = [promtool, "check", "rules", str(rules)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_engine_says_what_it_is_but_not_where_it_keeps_its_data() -> None:
    scrape = figures()
    samples = told(scrape)
    assert value(samples, "penstock_build_info", version="1.2.3", durability="disk") == 1
    assert value(samples, "penstock_policy_info", snapshot="abc123") == 1
    assert value(samples, "penstock_start_time_seconds") == 1_700_000_000.0
    assert b"/secret/place" not in scrape.text()


@pytest.mark.parametrize(("problem", "flag"), [("", 0), ("line 3: no such key", 1)])
def test_rules_that_were_not_taken_raise_a_flag(problem: str, flag: int) -> None:
    samples = told(figures(status=replace(STATUS, policy_problem=problem)))
    assert value(samples, "penstock_policy_problem") == flag


def test_workers_and_pools_are_told_of() -> None:
    samples = told(
        figures(
            workers=[a_worker(), a_worker(slots=2), a_worker(status="missing"), a_worker("gpu")],
            pools=[a_pool(), a_pool("gpu", paused=True)],
        )
    )
    assert value(samples, "penstock_workers", pool="default", status="ready") == 2
    assert value(samples, "penstock_workers", pool="default", status="missing") == 1
    assert value(samples, "penstock_pool_slots", pool="default") == 10
    assert value(samples, "penstock_pool_held", pool="gpu") == 5
    assert value(samples, "penstock_pool_paused", pool="gpu") == 1
    assert value(samples, "penstock_pool_paused", pool="default") == 0


def test_the_use_of_limits_is_told_by_key() -> None:
    uses = (LimitUse(("acme", "job.x"), 3, 9), LimitUse(("beta", "job.x"), 1, 0))
    samples = told(figures(limits=[LimitView(Limit(name="fair"), uses)]))
    assert value(samples, "penstock_limit_running", limit="fair", key="acme,job.x") == 3
    assert value(samples, "penstock_limit_waiting", limit="fair", key="acme,job.x") == 9
    assert value(samples, "penstock_limit_running", limit="fair", key="beta,job.x") == 1


def test_requests_are_counted_by_route_and_never_by_path() -> None:
    traffic = Traffic()
    for _ in range(3):
        traffic.count(GET, 200, 0.002)
    traffic.count(GET, 404, 0.3)
    traffic.count(None, 404, None)
    samples = told(figures(traffic=traffic))
    route = {"method": "GET", "route": "/v1/jobs/{job_id}"}
    name = "penstock_http_requests_total"
    assert value(samples, name, **route, status="200") == 3
    assert value(samples, name, **route, status="404") == 1
    assert value(samples, name, method="other", route="none", status="404") == 1


def test_times_fill_the_buckets_of_a_histogram() -> None:
    traffic = Traffic()
    for seconds in (0.0005, 0.001, 0.002, 0.3, 99.0):
        traffic.count(GET, 200, seconds)
    samples = told(figures(traffic=traffic))
    route = {"method": "GET", "route": "/v1/jobs/{job_id}"}
    name = "penstock_http_request_duration_seconds"
    counts = [value(samples, f"{name}_bucket", **route, le=str(end)) for end in BOUNDS]
    assert counts == [2, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4]
    assert value(samples, f"{name}_bucket", **route, le="+Inf") == 5
    assert value(samples, f"{name}_count", **route) == 5
    assert value(samples, f"{name}_sum", **route) == pytest.approx(99.3035)


def test_streams_and_the_events_sent_over_them_are_counted() -> None:
    samples = told(figures(streams=12, events=345))
    assert value(samples, "penstock_event_streams") == 12
    assert value(samples, "penstock_events_sent_total") == 345


def test_however_much_there_is_the_number_of_series_is_bounded() -> None:
    limits = [
        LimitView(Limit(name=f"limit-{n}"), tuple(LimitUse((f"t{k}",), 1, 1) for k in range(500)))
        for n in range(3)
    ]
    samples = told(
        figures(
            limits=limits,
            pools=[a_pool(f"pool-{n}") for n in range(1000)],
            workers=[a_worker(f"pool-{n}") for n in range(1000)],
        )
    )
    assert sum(name == "penstock_limit_running" for name, _ in samples) == 300
    assert sum(name == "penstock_pool_held" for name, _ in samples) == 100
    assert sum(name == "penstock_workers" for name, _ in samples) == 100


def test_odd_names_do_no_harm() -> None:
    odd = 'a"b\\c\nd'
    samples = told(figures(limits=[LimitView(Limit(name="odd"), (LimitUse((odd,), 1, 0),))]))
    assert value(samples, "penstock_limit_running", limit="odd", key=odd) == 1


@run_async
async def test_a_scrape_asks_the_engine_api() -> None:
    class Asked:
        limits: Any

        def __init__(self) -> None:
            self.limits = self

        async def status(self) -> EngineStatus:
            return STATUS

        async def workers(self) -> list[WorkerView]:
            return [a_worker()]

        async def pools(self) -> list[PoolView]:
            return [a_pool()]

        async def counts(self) -> JobCounts:
            return figures().counts

        async def list(self) -> list[LimitView]:
            return []

    scrape = await Figures.of(cast("EngineApi", Asked()), Traffic(), streams=2, events=3)
    assert scrape == figures(
        workers=[a_worker()], pools=[a_pool()], traffic=scrape.traffic, streams=2, events=3
    )


def test_every_figure_is_on_its_page() -> None:
    page = Path(__file__).parents[2] / "docs/reference/metrics.md"
    told = re.findall(r"^\| `(penstock_\w+)` \| (.*?) \|", page.read_text("utf-8"), re.M)
    ours = {}
    for family in text_string_to_metric_families(whole().text().decode()):
        sample = family.samples[-1]
        name = sample.name if family.type == "counter" else family.name
        ours[name] = set(sample.labels) - {"le"}
    assert {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in told} == ours
