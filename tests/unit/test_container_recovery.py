"""What a container worker decides when it starts again."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.config import OnRestart
from penstock.workloads.container.engine import ContainerState, Found
from penstock.workloads.container.job import ContainerRecord
from penstock.workloads.container.standing.recovery import (
    Adopt,
    Again,
    GiveUp,
    Remove,
    decide,
    owner_of,
    unsettled,
)

ADOPT, END = OnRestart.ADOPT, OnRestart.END


def a_record(name: str, state: ContainerJobState = ContainerJobState.RUNNING) -> ContainerRecord:
    return ContainerRecord(job_id=name, created_at=1, state=state, container=f"penstock-{name}")


def a_container(name: str, state: ContainerState = ContainerState.RUNNING) -> Found:
    return Found(f"penstock-{name}", state, {})


@pytest.mark.parametrize(
    ("state", "on_restart", "stopped"),
    [
        (ContainerState.RUNNING, ADOPT, False),
        (ContainerState.RUNNING, END, True),
        (ContainerState.EXITED, ADOPT, False),
        (ContainerState.EXITED, END, False),
    ],
)
def test_a_jobs_container_is_taken_up(
    state: ContainerState, on_restart: OnRestart, stopped: bool
) -> None:
    record, found = a_record("a"), a_container("a", state)
    (decision,) = decide([record], [found], on_restart)
    assert isinstance(decision, Adopt)
    assert (decision.record, decision.found) == (record, found)
    assert bool(decision.stop) is stopped


@pytest.mark.parametrize("on_restart", OnRestart)
def test_a_job_whose_container_was_not_started_is_given_up_and_the_container_goes(
    on_restart: OnRestart,
) -> None:
    record, found = a_record("a"), a_container("a", ContainerState.CREATED)
    given_up, removed = decide([record], [found], on_restart)
    assert isinstance(given_up, GiveUp)
    assert "not yet started" in given_up.message
    assert removed == Remove(found)


@pytest.mark.parametrize("on_restart", OnRestart)
def test_a_job_without_a_container_is_given_up(on_restart: OnRestart) -> None:
    (decision,) = decide([a_record("a")], [], on_restart)
    assert isinstance(decision, GiveUp)
    assert "had not been made" in decision.message


@pytest.mark.parametrize("on_restart", OnRestart)
def test_a_job_that_names_no_container_is_begun_anew(on_restart: OnRestart) -> None:
    record = replace(a_record("a"), container="")
    made = a_container("a", ContainerState.CREATED)
    assert decide([record], [made], on_restart) == [Again(record), Remove(made)]


@pytest.mark.parametrize("state", [s for s in ContainerJobState if s != "running"])
@pytest.mark.parametrize("on_restart", OnRestart)
def test_a_container_whose_job_does_not_run_is_removed(
    state: ContainerJobState, on_restart: OnRestart
) -> None:
    found = a_container("a")
    assert decide([a_record("a", state)], [found], on_restart) == [Remove(found)]


@pytest.mark.parametrize("state", ContainerState)
def test_only_a_container_that_was_made_and_not_started_may_still_change(
    state: ContainerState,
) -> None:
    found = [a_container("a", state), a_container("x", ContainerState.CREATED)]
    assert unsettled([a_record("a")], found) is (state is ContainerState.CREATED)


def test_each_job_and_each_container_is_decided_once() -> None:
    records = [a_record("a"), a_record("b"), a_record("c", ContainerJobState.QUEUED)]
    found = [a_container("x"), a_container("b"), a_container("y", ContainerState.EXITED)]
    decisions = decide(records, found, ADOPT)
    assert [type(decision) for decision in decisions] == [GiveUp, Adopt, Remove, Remove]


def test_an_owner_is_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    owner = owner_of(folder)
    assert owner_of(folder) == owner
    assert owner_of(tmp_path) != owner
    assert [path.name for path in folder.iterdir()] == ["owner"]


def test_an_owner_that_is_no_owner_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "owner").write_text("")
    assert owner_of(tmp_path) == owner_of(tmp_path) != ""
