from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.rows import every

from penstock.core.errors import InvalidRequest, Misconfigured
from penstock.core.job import NO_RETRY, Priority, RetryPolicy
from penstock.ports.executor import Context
from penstock.testing.aio import run_async
from penstock.workloads.function.context import running
from penstock.workloads.function.definition import JobFunction, make_function
from penstock.workloads.function.options import Mode, kinds


class Notebook:
    """A Submitter that writes down what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def _submit_checked(
        self, topic: str, payloads: Sequence[bytes], options: Mapping[str, Any]
    ) -> list[str]:
        self.calls.append((topic, [json.loads(payload) for payload in payloads], dict(options)))
        return ["submitted"] * len(payloads)

    async def _asubmit_checked(
        self, topic: str, payloads: Sequence[bytes], options: Mapping[str, Any]
    ) -> list[str]:
        return self._submit_checked(topic, payloads, options)


class Oops(Exception):
    pass


def plain(text: str, times: int = 1) -> str:
    return text * times


async def coroutine(text: str) -> str:
    return text


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


def define(fn: Any = plain, notebook: Any = None, **said: Any) -> JobFunction[..., Any]:
    return make_function(fn, "job.plain", lambda: notebook, **said)


def test_calling_a_job_function_runs_the_plain_function() -> None:
    assert define()("ab", times=2) == "abab"


def test_a_job_function_keeps_its_functions_name_and_docstring() -> None:
    job = define()
    assert (vars(job)["__name__"], job.__doc__) == ("plain", plain.__doc__)


def test_submit_hands_over_bound_arguments(notebook: Notebook) -> None:
    assert define(notebook=notebook).submit("hello", times=2) == "submitted"
    assert notebook.calls == [("job.plain", [{"text": "hello", "times": 2}], {})]


@run_async
async def test_asubmit_hands_over_the_same() -> None:
    notebook = Notebook()
    await define(notebook=notebook).asubmit("hello")
    assert notebook.calls == [("job.plain", [{"text": "hello"}], {})]


def test_a_wrong_argument_is_refused_before_anything_is_submitted(notebook: Notebook) -> None:
    with pytest.raises(InvalidRequest, match=r"input\.text: expected str, got int"):
        define(notebook=notebook).submit(5)
    assert notebook.calls == []


def test_what_the_definition_says_travels_with_every_job(notebook: Notebook) -> None:
    job = define(notebook=notebook, timeout=30, retries=3, priority="interactive", idempotent=True)
    job.submit("a")
    assert notebook.calls[0][2] == {
        "timeout": 30,
        "retry": RetryPolicy(retries=3),
        "priority": Priority.INTERACTIVE,
        "idempotent": True,
    }


def test_options_apply_to_the_variant_only(notebook: Notebook) -> None:
    job = define(notebook=notebook, timeout=30)
    urgent = job.options(priority="critical", timeout=5, labels={"team": "a"}, key="k")
    urgent.submit("a")
    job.submit("b")
    assert notebook.calls[0][2] == {
        "timeout": 5,
        "priority": Priority.CRITICAL,
        "labels": {"team": "a"},
        "key": "k",
    }
    assert notebook.calls[1][2] == {"timeout": 30}


def test_options_add_up(notebook: Notebook) -> None:
    define(notebook=notebook).options(tenant="t").options(delay=5).submit("a")
    assert notebook.calls[0][2] == {"tenant": "t", "delay": 5}


def test_times_may_be_datetimes(notebook: Notebook) -> None:
    at = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    define(notebook=notebook).options(run_at=at, delay=dt.timedelta(minutes=1)).submit("a")
    assert notebook.calls[0][2] == {"run_at": at.timestamp(), "delay": 60.0}


def test_a_parent_may_be_anything_with_a_job_id(notebook: Notebook) -> None:
    job = define(notebook=notebook)
    job.options(parent=SimpleNamespace(job_id="p-1"), workflow_id="w", step_index=2).submit("a")
    assert notebook.calls[0][2] == {"parent": "p-1", "workflow_id": "w", "step_index": 2}


@every(
    "options, problem",
    [
        ({"priority": "urgent"}, "priority: 'urgent' is not a priority"),
        ({"priority": 3}, "priority: 3 is not a priority"),
        ({"timeout": -1}, "timeout: -1 is out of range"),
        ({"timeout": "30"}, "timeout: expected a number, got str"),
        ({"timeout": True}, "timeout: expected a number, got bool"),
        ({"timeout": float("nan")}, "timeout: nan is not a number"),
        ({"delay": 1e12}, "delay: 1e.12 is out of range"),
        ({"run_at": dt.datetime(2030, 1, 1)}, "run_at: .* has no time zone"),
        ({"labels": {"a": 1}}, "labels.a: expected str, got int"),
        ({"env": ["a"]}, "env: expected a mapping, got list"),
        ({"job_id": "a b"}, "job_id: 'a b' is not a valid id"),
        ({"job_id": 5}, "job_id: expected str, got int"),
        ({"step_index": 1.5}, "step_index: expected int, got float"),
        ({"idempotent": 1}, "idempotent: expected bool, got int"),
        ({"retry": 3}, "retry: expected RetryPolicy, got int"),
        ({"priorty": "batch"}, "priorty: unexpected .did you mean priority"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        define().options(**options)


def test_submit_many_takes_tuples_and_dicts(notebook: Notebook) -> None:
    define(notebook=notebook).submit_many([("a",), ["b", 2], {"text": "c"}])
    assert notebook.calls[0][1] == [{"text": "a"}, {"text": "b", "times": 2}, {"text": "c"}]


@run_async
async def test_asubmit_many_takes_the_same() -> None:
    notebook = Notebook()
    await define(notebook=notebook).asubmit_many([("a",)])
    assert notebook.calls[0][1] == [{"text": "a"}]


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ([("a",), (5,)], r"inputs\[1\]\.text: expected str, got int"),
        (["a"], r"inputs\[0\]: expected a tuple or a dict of arguments, got str"),
        ([{}], r"inputs\[0\]\.text: is missing"),
    ],
)
def test_submit_many_names_the_input_that_is_wrong_and_submits_none(
    inputs: list[Any], problem: str, notebook: Notebook
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        define(notebook=notebook).submit_many(inputs)
    assert notebook.calls == []


def test_one_id_cannot_name_many_jobs() -> None:
    with pytest.raises(InvalidRequest, match="job_id: can't name more than one job"):
        define().options(job_id="j").submit_many([("a",)])


def test_the_mode_follows_from_the_function() -> None:
    assert define(plain).mode is Mode.THREAD
    assert define(coroutine).mode is Mode.ASYNC
    assert define(plain, mode="process").mode is Mode.PROCESS


def nested() -> Any:
    def inside() -> None: ...

    return inside


def generator() -> Any:
    yield 1


async def async_generator() -> Any:
    yield 1


@every(
    "fn, said, problem",
    [
        (lambda: 1, {"mode": "process"}, "another process can't import this"),
        (nested(), {"mode": "process"}, "another process can't import this"),
        (coroutine, {"mode": "process"}, "an async def runs in mode async"),
        (coroutine, {"mode": "thread"}, "an async def runs in mode async"),
        (plain, {"mode": "async"}, "mode async needs an async def"),
        (plain, {"mode": "fibre"}, "mode: 'fibre' is not a mode .async, thread, process"),
        (plain, {"memory_limit": 1 << 30}, "memory_limit: mode thread has none"),
        (plain, {"mode": "process", "memory_limit": 5}, "memory_limit: 5 is out of range"),
        (plain, {"timeout": 0}, "timeout: 0 is out of range"),
        (plain, {"retries": -1}, "retries: -1 is out of range"),
        (plain, {"retries": "3"}, "retries: expected int, got str"),
        (plain, {"retries": RetryPolicy(delay=-1)}, "retry.delay: -1 is out of range"),
        (plain, {"retry_on": (5,)}, "retry_on: 5 is neither an exception class nor"),
        (plain, {"idempotent": "yes"}, "idempotent: expected bool, got str"),
        (plain, {"retrys": 1}, "retrys: unexpected .did you mean retries"),
        (generator, {}, "can't be a generator"),
        (async_generator, {}, "can't be a generator"),
        (Oops, {}, "a job is a function, not a type"),
        (5, {}, "a job is a function, not a int"),
    ],
)
def test_a_wrong_definition_is_refused_by_name(fn: Any, said: dict[str, Any], problem: str) -> None:
    with pytest.raises(Misconfigured, match=problem):
        define(fn, **said)


@pytest.mark.parametrize("topic", ["text.shout", "", "job.", "job.a b", 5])
def test_a_wrong_topic_is_refused(topic: Any) -> None:
    with pytest.raises(Misconfigured, match="topic"):
        make_function(plain, topic, lambda: None)  # type: ignore[arg-type, return-value]


def test_nothing_said_is_no_retry() -> None:
    assert define().defaults.retry is NO_RETRY


def test_exception_classes_become_the_names_that_outcomes_carry() -> None:
    retry = define(retries=2, retry_on=(OSError, Oops, "KILLED"), retry_never=KeyError).defaults
    assert retry.retry.on == ("OSError", f"{__name__}.Oops", "KILLED")
    assert retry.retry.never == ("KeyError",)
    assert set(retry.retry.on[:1]) & set(kinds(ConnectionResetError))
    assert set(retry.retry.on[1:2]) & set(kinds(type("Worse", (Oops,), {})))


def test_a_policys_own_names_are_kept() -> None:
    policy = RetryPolicy(retries=2, on=("A",))
    assert define(retries=policy, retry_on="B").defaults.retry.on == ("A", "B")


def test_kinds_run_from_the_most_special_to_the_most_general() -> None:
    names = kinds(ConnectionResetError)
    assert names.index("ConnectionResetError") < names.index("OSError") < names.index("Exception")
    assert "builtins.OSError" in names


def test_a_function_with_a_context_is_submitted_without_it(notebook: Notebook) -> None:
    def with_context(ctx: Context, text: str) -> str:
        return text

    make_function(with_context, "job.plain", lambda: notebook).submit("a")
    assert notebook.calls[0][1] == [{"text": "a"}]


def with_ctx(ctx: Context, text: str) -> str:
    return f"{ctx.job_id} {text}"


def test_a_call_with_ctx_is_given_the_context_of_the_job_that_runs_here() -> None:
    job = define(with_ctx, ctx=True)
    with pytest.raises(Misconfigured, match="no job is running here"):
        job("a")
    token = running.set(cast(Context, SimpleNamespace(job_id="job-1")))
    try:
        assert job("a") == "job-1 a"
    finally:
        running.reset(token)


def test_ctx_needs_a_first_parameter_that_is_the_context() -> None:
    with pytest.raises(Misconfigured, match="the job plain: ctx=True, but its first parameter"):
        define(plain, ctx=True)
