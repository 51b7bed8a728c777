"""A pipeline says what is wrong with it where it is written, and describes itself truly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import pytest
from tests.support.rows import every

from penstock.core.errors import InvalidRequest, Misconfigured
from penstock.core.job import Retry, RetryPolicy
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.records import WhenOpen


class Config(msgspec.Struct, frozen=True):
    names: tuple[str, ...] = ("a",)
    width: Annotated[int, msgspec.Meta(ge=1, le=9)] = 2
    loud: bool = False


def one(**options: Any) -> Definition:
    return Definition("one", config=Config, **options)


async def fetch(name: str, ctx: Any) -> str:
    return name


def plain(name: str) -> str:
    return name


def many(a: int, b: int) -> None: ...


def generated(n: int) -> Any:
    yield n


def declared() -> Definition:
    """A pipeline with a first stage."""
    pipeline = one()
    pipeline.map()(fetch)
    return pipeline


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a name with a dot": (lambda: Definition("a.b"), "can't name a pipeline"),
    "no name": (lambda: Definition(""), "can't name a pipeline"),
    "a pipeline without stages": (lambda: one().check(), "has no stages"),
    "two stages of one name": (lambda: declared().map()(fetch), "has a stage fetch already"),
    "a stage over nothing": (lambda: one().map()(lambda word: word), "say what it maps over"),
    "a stage over a later one": (
        lambda: one().map(over="later")(fetch),
        "neither a stage before it nor a field",
    ),
    "a stage of an unknown one": (lambda: declared().step(of="x")(plain), "not a stage before it"),
    "a stage that needs itself": (
        lambda: declared().step(needs=["again"], name="again")(plain),
        "waits for itself",
    ),
    "a circle of two": (
        lambda: declared().step(needs=["next"], name="first")(plain),
        "not a stage before it",
    ),
    "an unknown flag": (
        lambda: declared().step(enabled="quiet")(plain),
        "the config has no field 'quiet'",
    ),
    "no calls at once": (lambda: one().map(concurrency=0)(fetch), "concurrency must be at least 1"),
    "an unknown width": (lambda: one().map(concurrency="size")(fetch), "size"),
    "no calls a second": (lambda: one().map(rate=0)(fetch), "rate must be above 0"),
    "a time that is none": (lambda: one().map(timeout="soon")(fetch), "is not a duration"),
    "less than no time": (lambda: one().map(timeout=-1)(fetch), "less than nothing"),
    "an unknown mode": (lambda: one().map(mode="magic")(fetch), "none of async, thread, process"),
    "an async function in a thread": (
        lambda: one().map(mode="thread")(fetch),
        "an async function can't run with mode='thread'",
    ),
    "a plain function in the loop": (
        lambda: one().map(over="names", mode="async")(plain),
        "a plain function can't run with mode='async'",
    ),
    "a generator in a process": (
        lambda: one().map(over="names", mode="process")(generated),
        "a generator can't run in a process",
    ),
    "a function of two things": (lambda: one().map(over="names")(many), "its function wants a, b"),
    "no function": (lambda: one().map(over="names", name="x")(3), "can't be called"),  # type: ignore[type-var]
    "an unknown policy for an open breaker": (
        lambda: one().map(when_open="panic")(fetch),
        "none of wait, skip, fail",
    ),
    "an unknown setting of a breaker": (
        lambda: one(breakers={"feeds": {"treshold": 2}}),
        "breaker feeds: Object contains unknown field `treshold`",
    ),
    "an unknown status policy": (lambda: one(policy="lenient"), "no status policy 'lenient'"),
    "an unknown policy for a change": (lambda: one(on_change="hope"), "none of resume, restart"),
    "an unknown policy for an orphan": (lambda: one(on_orphan="adopt"), "none of resume, fail"),
    "a summary after no stage": (
        lambda: _summarised("nowhere").check(),
        "there is no stage 'nowhere'",
    ),
    "a stage's name with spaces": (
        lambda: one().map(over="names", name="a stage")(fetch),
        "can't name a stage",
    ),
}


def _summarised(after: str) -> Definition:
    pipeline = one(summary_after=after)
    pipeline.map()(fetch)
    return pipeline


@every("what", WRONG)
def test_a_wrong_definition_is_refused_where_it_is_written(what: str) -> None:
    make, said = WRONG[what]
    with pytest.raises(Misconfigured) as caught:
        make()
    assert said in str(caught.value)


# -- stages ---------------------------------------------------------------------------------


def test_a_map_without_over_goes_over_the_field_named_like_its_parameter() -> None:
    assert declared().stages["fetch"].info.over == "config:names"


def test_a_map_goes_over_a_stage_by_itself_or_by_its_name() -> None:
    pipeline = declared()
    pipeline.map(over=pipeline.stages["fetch"], name="by_stage")(plain)
    pipeline.map(over="fetch", name="by_name")(plain)
    assert [pipeline.stages[name].info.over for name in ("by_stage", "by_name")] == [
        "stage:fetch"
    ] * 2


def test_a_stage_is_still_the_function_it_was() -> None:
    pipeline = one()
    stage = pipeline.map(over="names")(plain)
    assert stage("x") == "x"
    assert stage.__name__ == "plain"


def test_a_step_is_given_the_results_of_the_stage_before_it() -> None:
    pipeline = declared()
    pipeline.step()(plain)
    assert pipeline.stages["plain"].info.of == "fetch"


def test_plain_functions_run_in_threads_and_async_ones_in_the_loop() -> None:
    pipeline = declared()
    pipeline.step()(plain)
    assert [stage.info.mode for stage in pipeline.stages.values()] == ["async", "thread"]


@pytest.mark.parametrize(
    ("given", "retries"), [(Retry(3), 3), (3, 3), (RetryPolicy(3), 3), (None, 0)]
)
def test_a_number_a_retry_or_a_policy_says_how_often(given: Any, retries: int) -> None:
    pipeline = one()
    pipeline.map(retry=given)(fetch)
    assert pipeline.stages["fetch"].info.retry.retries == retries


def test_retry_says_after_how_long_and_upon_which_errors() -> None:
    policy = Retry(2, delay=5, max_delay=9, on=(OSError, "Timeout"), never=(ValueError,)).policy
    assert (policy.retries, policy.delay, policy.max_delay) == (2, 5, 9)
    assert (policy.on, policy.never) == (("OSError", "Timeout"), ("ValueError",))


def test_how_many_at_once_may_be_a_field_of_the_config() -> None:
    pipeline = one()
    pipeline.map(concurrency="width")(fetch)
    assert pipeline.stages["fetch"].concurrency(pipeline.config_of({"width": 7})) == 7


# -- config ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"width": 10}, "config.width"),
        ({"width": 0}, "config.width"),
        ({"width": "x"}, "config.width"),
        ({"names": ["a", 1]}, "config.names[1]"),
        ({"nmaes": []}, "config.nmaes"),
        ([], "config"),
        ("x", "config"),
    ],
)
def test_a_wrong_config_names_its_field(given: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        one().config_of(given)
    assert caught.value.field == field


def test_a_config_is_frozen_with_all_its_defaults() -> None:
    assert one().plain_config({"width": 3}) == {"names": ["a"], "width": 3, "loud": False}
    assert one().plain_config(Config(loud=True))["loud"] is True
    assert one().plain_config(None) == {"names": ["a"], "width": 2, "loud": False}


def test_a_dataclass_is_a_config_too() -> None:
    @dataclass
    class Small:
        size: int = 1

    pipeline = Definition("small", config=Small)
    assert pipeline.config_of({"size": 2}) == Small(2)
    with pytest.raises(InvalidRequest, match=r"config\.size"):
        pipeline.config_of({"size": "x"})


def test_without_a_type_any_object_is_a_config() -> None:
    assert Definition("free").plain_config({"a": [1]}) == {"a": [1]}


# -- what it tells --------------------------------------------------------------------------


def test_it_describes_itself() -> None:
    pipeline = one(doc="Words.", stale_after="1h", single_flight=False)
    pipeline.map(breaker="b", when_open="skip", timeout="2s", critical=True)(fetch)
    info = pipeline.info()
    assert (info.name, info.topic, info.doc) == ("one", "job.pipeline.one", "Words.")
    assert (info.stale_after, info.single_flight) == (3600.0, False)
    (stage,) = info.stages
    assert (stage.breaker, stage.when_open, stage.timeout) == ("b", WhenOpen.SKIP, 2.0)
    assert stage.critical
    properties = info.config_schema["$defs"]["Config"]["properties"]
    assert properties["width"]["maximum"] == 9
    assert msgspec.json.decode(msgspec.json.encode(info), type=type(info)) == info


def test_the_fingerprint_changes_with_the_stages_and_not_with_their_code() -> None:
    def other(name: str, ctx: Any) -> str:
        return name + "!"

    other.__name__ = "fetch"
    same, changed, longer = one(), one(), declared()
    same.map()(other)
    changed.map(version="2")(fetch)
    longer.step()(plain)
    prints = {p.fingerprint for p in (declared(), same)}
    assert len(prints) == 1
    assert not prints & {changed.fingerprint, longer.fingerprint}
