"""Each kind of bad input gets a clear error that names it; nothing else is harmed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.acceptance.bad_jobs import add, app
from tests.support.rows import every

import penstock
from penstock import JobState


@pytest.fixture(scope="module")
def ps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[penstock.Client]:
    folder = tmp_path_factory.mktemp("engine")
    with app.run(
        folder, limits__max_result=100_000, limits__max_input=50_000, timeouts__kill_grace=0.2
    ) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_else_is_harmed(ps: penstock.Client) -> Iterator[None]:
    before = sum(ps.status().tally.values())
    yield
    assert add.submit(1).result(timeout=30) == 2
    assert sum(ps.status().tally.values()) >= before + 1


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("job.nobody.knows", {}, {}, "topic: no worker serves 'job.nobody.knows'"),
    ("job.good.ad", {"a": 1}, {}, "did you mean job.good.add?"),
    ("not a topic", {}, {}, "topic: 'not a topic' is not a valid topic"),
    ("job.good.add", {"a": "1"}, {}, "input.a: expected int, got str"),
    ("job.good.add", {"a": 1.5}, {}, "input.a: expected int, got float"),
    ("job.good.add", {}, {}, "input.a: is missing"),
    ("job.good.add", {"a": 1, "c": 2}, {}, "input.c: unexpected"),
    ("job.good.add", {"a": float("nan")}, {}, "input.a"),
    ("job.good.add", {"a": 1}, {"timeout": -1}, "timeout: -1 is out of range"),
    ("job.good.add", {"a": 1}, {"timeout": float("nan")}, "timeout: nan is not a number"),
    ("job.good.add", {"a": 1}, {"timeout": 1e12}, "timeout: 1e+12 is out of range"),
    ("job.good.add", {"a": 1}, {"timeout": "soon"}, "timeout: expected a number, got str"),
    ("job.good.add", {"a": 1}, {"priority": "urgent"}, "priority: 'urgent' is not a priority"),
    ("job.good.add", {"a": 1}, {"step_index": -1}, "step_index: -1 is out of range"),
    ("job.good.add", {"a": 1}, {"deadline": 1.0}, "deadline: is already past"),
    ("job.good.add", {"a": 1}, {"job_id": "../etc"}, "job_id: '../etc' is not a valid id"),
    ("job.good.add", {"a": 1}, {"job_id": "x" * 5000}, "is not a valid id"),
    ("job.good.add", {"a": 1}, {"labels": {"a": "b\0"}}, "labels.a: has a control character"),
    ("job.good.add", {"a": 1}, {"labels": {"a": 1}}, "labels.a: expected str, got int"),
    ("job.good.add", {"a": 1}, {"tenant": ""}, "tenant: '' is not a valid name"),
    ("job.good.add", {"a": 1}, {"colour": "red"}, "colour: unexpected"),
    (
        "job.good.add",
        {"a": 1},
        {"retry": penstock.RetryPolicy(retries=-1)},
        "retry.retries: -1 is out of range",
    ),
]


@every("topic, input, options, said", REFUSED)
def test_a_bad_request_is_refused_by_name_and_nothing_is_stored(
    ps: penstock.Client, topic: str, input: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    before = ps.status().tally
    with pytest.raises(penstock.InvalidRequest) as refused:
        ps.submit(topic, input, **options)
    assert said in str(refused.value)
    assert ps.status().tally == before


@pytest.mark.parametrize(
    ("pointer", "said"),
    [
        ("data:application/json;base64,!!!", "context_ptr"),
        ("blob:sha256-" + "0" * 64, "context_ptr"),
        ("file:///etc/passwd", "context_ptr"),
        ("https://example.org/input.json", "context_ptr"),
        ("nonsense", "context_ptr"),
    ],
)
def test_a_pointer_that_cannot_be_read_is_refused(
    ps: penstock.Client, pointer: str, said: str
) -> None:
    before = ps.status().tally
    request = penstock.JobRequest(job_id="", topic="job.good.add", context_ptr=pointer)
    with pytest.raises(penstock.InvalidRequest, match=said):
        ps._engine.portal.run(ps.api.submit([request]))
    assert ps.status().tally == before


def test_an_input_over_its_limit_is_refused(ps: penstock.Client) -> None:
    with pytest.raises(penstock.InvalidRequest, match="input"):
        ps.submit("job.good.add", {"a": 1, "c": "x" * 60_000})
    with pytest.raises(penstock.InvalidRequest, match=r"50,?000"):
        request = penstock.JobRequest(
            job_id="",
            topic="job.good.add",
            context_ptr=ps._engine.portal.run(
                ps.api.put_blob(b'{"a": 1, "c": "%s"}' % (b"x" * 60_000))
            ),
        )
        ps._engine.portal.run(ps.api.submit([request]))


def test_a_used_id_is_the_same_job_again_or_a_conflict(ps: penstock.Client) -> None:
    first = ps.submit("job.good.add", {"a": 1}, job_id="used")
    assert ps.submit("job.good.add", {"a": 1}, job_id="used").job_id == first.job_id
    with pytest.raises(penstock.Conflict, match="'used' is taken by a different request"):
        ps.submit("job.good.add", {"a": 2}, job_id="used")


@pytest.mark.parametrize(
    ("topic", "input", "code", "said"),
    [
        ("job.bad.big", {"size": 200_000}, "RESULT_TOO_LARGE", r"100,?000"),
        ("job.bad.unstorable", {}, "RESULT_NOT_STORABLE", "lock"),
        ("job.bad.nan", {}, "RESULT_NOT_STORABLE", "nan"),
        ("job.bad.raises", {}, "LookupError", "no such thing"),
        ("job.bad.exits", {}, "EXITED", "3"),
        ("job.bad.exits_process", {}, "EXITED", "7"),
        ("job.bad.killed", {}, "KILLED", "SIGSEGV"),
        ("job.bad.hungry", {}, "OUT_OF_MEMORY", "memory"),
    ],
)
def test_a_function_that_misbehaves_fails_its_job_with_the_cause(
    ps: penstock.Client, topic: str, input: dict[str, Any], code: str, said: str
) -> None:
    with pytest.raises(penstock.JobFailed, match=said) as failed:
        ps.submit(topic, input).result(timeout=30)
    assert failed.value.error_code == code


@pytest.mark.parametrize("topic", ["job.bad.endless", "job.bad.endless_process"])
def test_a_function_that_never_returns_times_out(ps: penstock.Client, topic: str) -> None:
    with pytest.raises(penstock.JobTimedOut, match="it ran for more than"):
        ps.submit(topic).result(timeout=30)


# -- the data folder ------------------------------------------------------------------


def test_a_foreign_database_is_refused(tmp_path: Path) -> None:
    foreign = sqlite3.connect(tmp_path / "penstock.db")
    foreign.execute("CREATE TABLE theirs (x)")
    foreign.commit()
    foreign.close()
    with pytest.raises(penstock.PenstockError, match="not one of Penstock's"), app.run(tmp_path):
        pass


def test_a_corrupt_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "penstock.db").write_bytes(b"not a database at all, but long enough" * 100)
    with pytest.raises(penstock.PenstockError, match="not a readable database"), app.run(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = app.run(tmp_path / "file" / "data")
    with pytest.raises(penstock.PenstockError, match="can't make the folder"), nowhere:
        pass


def test_a_folder_without_permission_is_named() -> None:
    forbidden = app.run("/proc/penstock")
    with pytest.raises(penstock.PenstockError, match=r"can't (make|write)"), forbidden:
        pass


def test_a_good_job_after_all_that_still_works(ps: penstock.Client) -> None:
    job = add.submit(20, 22)
    assert job.result(timeout=30) == 42
    assert job.state is JobState.SUCCEEDED
