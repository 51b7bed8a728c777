"""Reading results through a client."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.app.client import outcome_of
from penstock.core.job import Job
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobState
from penstock.testing.aio import run_async
from penstock.testing.samples import a_job, succeeded


class Asked:
    """An engine that notes which blobs it is asked for."""

    def __init__(self) -> None:
        self.blobs: list[str] = []

    async def get_blob(self, uri: str) -> bytes:
        self.blobs.append(uri)
        return b'"large"'


def ended(pointer: str | None) -> Job:
    return replace(a_job("a", JobState.SUCCEEDED), result=succeeded("a", result_ptr=pointer))


@run_async
async def test_a_small_result_is_read_from_its_pointer_without_asking_the_engine() -> None:
    engine = Asked()
    assert (await outcome_of(engine, ended(encode_data(b'["small"]')))).payload == b'["small"]'
    assert (await outcome_of(engine, ended(None))).payload == b"null"
    assert engine.blobs == []


@run_async
async def test_a_large_result_is_asked_for() -> None:
    engine = Asked()
    assert (await outcome_of(engine, ended("blob:sha256-" + "0" * 64))).payload == b'"large"'
    assert engine.blobs == ["blob:sha256-" + "0" * 64]
