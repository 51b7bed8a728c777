"""Results come back as what their function says, whoever asks."""

from __future__ import annotations

import datetime as dt
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs.typed_jobs import (
    Money,
    Page,
    app,
    fail,
    fail_in_process,
    fail_in_thread,
    liar,
    ones,
    unstorable,
    visit,
    visit_in_process,
    visit_in_thread,
)

import penstock
from penstock.testing.aio import run_async

NOON = dt.datetime(2026, 1, 2, 12, tzinfo=dt.UTC)
PAGE = Page("a", NOON, {"b", "c"}, Money(5), Path("a/b"))
LATER = Page("a", NOON + dt.timedelta(hours=1), {"b", "c"}, Money(5), Path("a/b"))


@pytest.mark.parametrize("job", [visit, visit_in_thread, visit_in_process])
def test_arguments_and_results_keep_their_types_in_every_mode(job: Any, tmp_path: Path) -> None:
    with app.run(tmp_path, durability="memory") as ps:
        submitted = job.submit(PAGE, later=dt.timedelta(hours=1))
        assert submitted.result(20) == LATER
        assert ps.get(submitted.job_id).result(5) == LATER
        assert ps.submit(job.topic, {"page": PAGE, "later": "PT1H"}).result(20) == LATER


@run_async
async def test_async_callers_get_them_too(tmp_path: Path) -> None:
    async with app.run(tmp_path, durability="memory"):
        handle = await visit.asubmit(PAGE, dt.timedelta(hours=1))
        assert await handle == LATER


def test_a_client_that_does_not_know_the_function_gets_plain_json(tmp_path: Path) -> None:
    with app.run(tmp_path), penstock.connect(data=tmp_path) as stranger:
        job_id = visit.submit(PAGE, dt.timedelta(hours=1)).job_id
        result = stranger.get(job_id).result(5)
        assert result == {
            "url": "a",
            "fetched": "2026-01-02T13:00:00Z",
            "links": result["links"],
            "price": 5,
            "saved": "a/b",
        }
        assert sorted(result["links"]) == ["b", "c"]


@pytest.mark.parametrize("count", [3, 100_000])
def test_an_array_is_stored_as_its_own_media_type(count: int, tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    with app.run(tmp_path, durability="memory") as ps:
        job = ones.submit(count)
        assert (job.result(20) == np.ones(count)).all()
        result = job.refresh().result
        assert result is not None
        assert result.result_ptr is not None
        assert "application/x-npy" in result.result_ptr
        assert ps.read(result.result_ptr).startswith(b"\x93NUMPY")


def test_a_result_of_another_type_than_announced_fails_the_job(tmp_path: Path) -> None:
    with app.run(tmp_path, durability="memory"):
        job = liar.options(retry=penstock.RetryPolicy(retries=3)).submit(2)
        with pytest.raises(penstock.JobFailed, match=r"result\[2\]\.fetched: is missing") as caught:
            job.result(5)
        assert caught.value.error_code == "RESULT_WRONG_TYPE"
        assert caught.value.job.request.retry_number == 0


def test_a_result_that_cannot_be_stored_fails_the_job_and_names_the_place(tmp_path: Path) -> None:
    message = r"result\.rows\[1\]: can't be stored as JSON"
    with (
        app.run(tmp_path, durability="memory"),
        pytest.raises(penstock.JobFailed, match=message),
    ):
        unstorable.submit().result(5)


def test_an_argument_that_cannot_be_stored_is_refused_and_nothing_is_stored(
    tmp_path: Path,
) -> None:
    with app.run(tmp_path, durability="memory") as ps:
        page = Page("a", NOON, {object()})  # type: ignore[arg-type]
        with pytest.raises(penstock.InvalidRequest, match=r"input\.page\.links\[0\]: can't be"):
            visit.submit(page, dt.timedelta())
        with pytest.raises(penstock.InvalidRequest, match=r"input\.page\.links\[0\]: can't be"):
            ps.submit("job.typed.visit", {"page": page, "later": "PT1H"})
        with pytest.raises(penstock.InvalidRequest, match=r"input\.page\.price: expected Money"):
            ps.submit("job.typed.visit", {"page": {**PLAIN, "price": "x"}, "later": "PT1H"})
        assert ps.jobs() == []


PLAIN = {"url": "a", "fetched": "2026-01-02T13:00:00Z"}


def test_a_failure_carries_class_message_and_remote_traceback(tmp_path: Path) -> None:
    with app.run(tmp_path, durability="memory"):
        for job in (fail, fail_in_thread, fail_in_process):
            submitted = job.submit("boom")
            with pytest.raises(penstock.JobFailed) as caught:
                submitted.result(20)
            error = caught.value
            message = f"job {submitted.job_id} ended FAILED: LookupFailed: boom"
            assert str(error) == message
            assert error.error_code == "LookupFailed"
            assert error.error_type is not None
            assert error.error_type.endswith("typed_jobs.LookupFailed")
            assert error.error_message == "boom"
            assert error.job.job_id == submitted.job_id
            assert error.retryable
            printed = "".join(traceback.format_exception(error))
            assert "KeyError: 'boom'" in printed
            assert 'raise LookupFailed("boom")' not in printed
            assert "raise LookupFailed(word) from error" in printed
            assert "in deeper" in printed
            assert "penstock/workloads" not in printed
            assert printed.rstrip().endswith(message)
            assert any("in deeper" in line.text for line in submitted.logs())


def test_the_traceback_survives_the_engine_and_is_bounded(tmp_path: Path) -> None:
    with app.run(tmp_path):
        job_id = fail.submit("x" * 50_000).job_id
        with pytest.raises(penstock.JobFailed):
            app.client().get(job_id).result(5)
    with app.run(tmp_path) as ps, pytest.raises(penstock.JobFailed) as caught:
        ps.get(job_id).result(5)
    assert caught.value.traceback is not None
    assert len(caught.value.traceback) <= 8_000
    assert str(caught.value.__cause__).rstrip('"\n').endswith("xxx")


@pytest.mark.parametrize("policy", [{"never": ("LookupFailed",)}, {"on": ("OSError",)}])
def test_a_failure_that_the_policy_leaves_out_is_not_retryable(
    policy: dict[str, Any], tmp_path: Path
) -> None:
    with app.run(tmp_path, durability="memory"):
        job = fail.options(retry=penstock.RetryPolicy(retries=1, **policy)).submit("boom")
        with pytest.raises(penstock.JobFailed) as caught:
            job.result(5)
        assert not caught.value.retryable
        with pytest.raises(penstock.JobFailed) as caught:
            liar.submit(0).result(5)
        assert not caught.value.retryable
        assert caught.value.error_type is None
        assert caught.value.__cause__ is None


def test_a_failure_can_cross_a_process_boundary(tmp_path: Path) -> None:
    with app.run(tmp_path, durability="memory"), pytest.raises(penstock.JobFailed) as caught:
        fail.submit("boom").result(5)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert str(again.__cause__) == str(caught.value.__cause__)
