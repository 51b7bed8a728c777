"""Whatever goes wrong and whenever somebody stops a job: one end, and nothing is left."""

from __future__ import annotations

import asyncio
import math
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.container.container_runs import IMAGE, Rig, code_of, virtually
from tests.support.fake_containers import Fault, Say, Script

from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.engine import (
    CommandNotFound,
    ContainerNotFound,
    EngineError,
    EngineUnavailable,
    ImageNotFound,
)
from penstock.workloads.container.job import Stream

METHODS = ("image", "pull", "create", "attach", "start", "wait", "usage", "signal", "kill", "find")
ERRORS = (
    EngineError("odd"),
    EngineUnavailable("away"),
    ContainerNotFound("gone"),
    ImageNotFound("none"),
    CommandNotFound("no such file"),
)
seconds = st.sampled_from((0, 0, 0, 0.1, 1.0, 9.0, 10.0, 20.0, math.inf))
faults = st.builds(Fault, error=st.sampled_from((None, *ERRORS)), before=seconds, after=seconds)
scripts = st.builds(
    Script,
    says=st.lists(
        st.builds(
            Say,
            st.sampled_from((b"x", b"y" * 200_000)),
            st.sampled_from(Stream),
            st.sampled_from((0, 0.5, 3.0)),
        ),
        max_size=3,
    ).map(tuple),
    leaves=st.sampled_from(({}, {"f": b"1"}, {"f": b"1" * 2000})),
    echoes=st.booleans(),
    reads=st.booleans(),
    seconds=st.sampled_from((0, 1, 9.9, 10, 30, 1000)),
    exit_code=st.sampled_from((0, 0, 1, 137, None)),
    oom=st.booleans(),
    heeds_term=st.booleans(),
    usage_after_end=st.booleans(),
)
whens = st.sampled_from((0, 0.05, 1.0, 5.0, 10.0, 12.0, 16.0))
events = st.lists(
    st.tuples(whens, st.sampled_from(("stop", "die", "perish", "revive", "cut", "let go"))),
    max_size=4,
)


async def play(rig: Rig, what: list[tuple[float, str]], running: asyncio.Task[object]) -> None:
    """Do these things one after the other; at last the engine is there."""
    for pause, event in what:
        await rig.passes(pause)
        if event == "stop":
            rig.stop.request("enough")
        elif event in ("die", "perish"):
            rig.engine.die(spare=event == "die")
        elif event == "revive":
            rig.engine.revive()
        elif event == "cut" and rig.container in rig.engine.containers:
            rig.engine.cut(rig.container)
        elif event == "let go":
            running.cancel()
    await asyncio.wait((running,))
    rig.engine.revive()


@settings(max_examples=300)
@given(
    script=scripts,
    what=events,
    broken=st.lists(st.tuples(st.sampled_from(METHODS), faults), max_size=3),
    present=st.booleans(),
    outputs=st.booleans(),
    stdin=st.sampled_from((b"", b"short", b"z" * 500_000)),
)
def test_a_job_ends_once_and_leaves_nothing(
    script: Script,
    what: list[tuple[float, str]],
    broken: list[tuple[str, Fault]],
    present: bool,
    outputs: bool,
    stdin: bytes,
) -> None:
    async def body(rig: Rig) -> None:
        (rig.engine.scripts if present else rig.engine.registry)[IMAGE] = script
        if not present:
            rig.engine.scripts.clear()
        for method, fault in broken:
            rig.engine.fault(method, fault)
        rig.asks(outputs=outputs, stdin_bytes=stdin, limits={"max_artifact_bytes": 1000})
        began = rig.clock.now()
        running = rig.begin()
        await play(rig, what, running)
        if running.cancelled():
            rig.engine._faults.clear()
            found = await rig.engine.find({})
            if not found:
                return
            rig.stop = type(rig.stop)()
            end = await rig.adopt(found[0], began)
        else:
            end = running.result()
        assert end.state in (ContainerJobState.FINISHED, ContainerJobState.FAILED)
        assert (end.state is ContainerJobState.FINISHED) is (code_of(end) is None)
        if end.state is ContainerJobState.FINISHED:
            assert (end.exit_code, script.exit_code) == (0, 0)
        if code_of(end) in ("TIMEOUT", "CANCELLED", "ENGINE_UNAVAILABLE"):
            assert end.exit_code is None
        assert rig.clock.monotonic() < 1000
        rig.engine._faults.clear()
        assert await rig.remove()
        assert rig.engine.leftovers() == []
        assert not rig.sandbox.folder.exists()

    with tempfile.TemporaryDirectory() as folder:
        virtually(Path(folder), body)
