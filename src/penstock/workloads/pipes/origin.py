"""The origin's part: jobs begin and end here, and their callers are answered here and nowhere else.

A job takes one way after another until one brings it to its end: a node that is lost, stalls or
computes nonsense is left aside. What was generated so far is replayed, and only who takes the place
of that node computes it: the others have it in their caches. What was told stays told: nothing is
repeated or skipped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass
from os import urandom
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.lifecycles.processor import ERRORS, ProcessorEvent
from penstock.workloads.llm.runner import ProgressListener
from penstock.workloads.llm.values import (
    Completion,
    Delta,
    GenerationRequest,
    LlmCode,
    LlmFailure,
    Timings,
    Usage,
)
from penstock.workloads.pipes.generation import (
    Broken,
    CachedPrefix,
    Completed,
    Generation,
    Prefixes,
    Read,
    Wrote,
    blamed,
    code_of,
)
from penstock.workloads.pipes.job import Job, JobTiming
from penstock.workloads.pipes.routes import NoRoute, Route
from penstock.workloads.pipes.text.constraint import is_constrained
from penstock.workloads.pipes.text.speculation import Lookup, Speculation, StepTimes
from penstock.workloads.pipes.text.tokenizing import Text
from penstock.workloads.pipes.wire.messages import Acked, End, Open, Opened, Refused

if TYPE_CHECKING:
    import torch

    from penstock.workloads.pipes.node import Node

log = logging.getLogger(__name__)

UNSAID = 512
"""Tokens of an answer for which cache is reserved at first if the request has no max_tokens."""
ROUTES = 5
"""How many are tried without a token more before a job is given up, if they are still there."""
_AGAIN = frozenset(
    {
        LlmCode.NODE_LOST,
        LlmCode.NODE_STALLED,
        LlmCode.ENGINE_ERROR,
        LlmCode.OUT_OF_MEMORY,
        LlmCode.WRONG_COMPUTATION,
        LlmCode.NO_LOCAL_MODEL,
        LlmCode.JOB_MISSING,
        LlmCode.PIPE_UNAVAILABLE,
    }
)
"""What another way may mend."""
_GONE = frozenset({LlmCode.NODE_LOST, LlmCode.NO_LOCAL_MODEL, LlmCode.PIPE_UNAVAILABLE})


class _NodeFull(Exception):
    """A node has no room, and others have copies of its layers."""


@dataclass(eq=False)
class _Asking:
    """A node was asked for room."""

    answer: asyncio.Future[Opened]
    waits: bool = False
    """It said that there is none yet."""


class Origin:
    def __init__(self, node: Node, text: Text, context: int, *, speculates: bool) -> None:
        """`speculates` if caches of the model's layers can be cut back."""
        self._node, self.text = node, text
        self._step_times = StepTimes() if speculates and node.config.speculation else None
        self.context = context
        """Tokens that a job may have."""
        self._under_way: set[Generation] = set()
        self._generations: dict[bytes, Generation] = {}
        """Those that have a way, by its job's id."""
        self._opening: dict[tuple[bytes, str], _Asking] = {}
        self.prefixes = Prefixes()
        self.closing = ""
        """Why nothing new is begun here any more."""

    @property
    def jobs(self) -> Counter[str]:
        """How many ways lead over each node."""
        return Counter(
            node for generation in self._generations.values() for node in generation.nodes
        )

    async def generate(
        self,
        ask: GenerationRequest,
        choice: int = 0,
        watch: ProgressListener | None = None,
        tenant: str = "",
        on_state: Callable[[torch.Tensor], None] | None = None,
    ) -> AsyncGenerator[Delta | Completion, None]:
        generation = await self._begin(ask, choice, watch)
        generation.tenant, generation.on_state = tenant, on_state
        self._under_way.add(generation)
        try:
            while True:
                try:
                    await self._set_out(generation)
                    async for piece in self._follow(generation):
                        yield piece
                    if generation.writer.finished is not None or not self._grow(generation):
                        break
                except Broken as broken:
                    if await self._is_over(generation, broken) or _is_cut_short(generation, broken):
                        break
                    self._turn_back(generation, broken)
                    await asyncio.sleep(generation.pause)
            for piece in _left(generation):
                yield piece
            if (
                generation.writer.finished is None
                and (last := generation.writer.end_here()) is not None
            ):
                yield last
            said = self._said(generation)
            if (kept := self._leave(generation, self._node.config.keep)) is not None:
                self.prefixes.add(kept)
            yield said
        finally:
            self._leave(generation)
            self._drop_left(generation)
            self._under_way.discard(generation)

    # -- what nodes say -------------------------------------------------------------

    def opened(self, node_id: str, message: Opened) -> None:
        asking = self._opening.get((message.job_id, node_id))
        generation = self._generations.get(message.job_id)
        if asking is None:
            if message.ok:  # it was given up meanwhile
                self._node.end(node_id, End(job_id=message.job_id, reason="not wanted any more"))
        elif asking.answer.done():
            return
        elif generation is not None and self._passes_over(generation, node_id, message):
            generation.full.add(node_id)
            asking.answer.set_exception(_NodeFull())
        elif message.waiting:
            asking.waits = True
            if generation is not None:
                generation.note(message.reason)
        else:
            asking.answer.set_result(message)

    def _passes_over(self, generation: Generation, node_id: str, message: Opened) -> bool:
        """Whether it is full, and other nodes that are not known to be full have its layers."""
        if node_id == self._node.node_id or not (
            message.waiting or (not message.ok and message.code == LlmCode.NO_ROOM)
        ):
            return False
        return isinstance(self._find(generation, {node_id}), Route)

    def acked(self, node_id: str, message: Acked) -> Refused | None:
        """Why it is not to be believed, if so."""
        generation = self._generations.get(message.job_id)
        if generation is None:
            return Refused.UNKNOWN_JOB
        if generation.hops[-1].node_id != node_id or not generation.may_land(message.sequence):
            return Refused.FOREIGN_ACK
        generation.sign = time.monotonic()
        return None

    def failed(self, node_id: str, job_id: bytes, failure: LlmFailure) -> Refused | None:
        """A node of the way can't go on. One that lost another is not to blame itself: the way
        between the two is. Why it is not to be believed, if so."""
        generation = self._generations.get(job_id)
        if generation is None:
            return Refused.UNKNOWN_JOB
        if node_id not in generation.nodes:
            return Refused.FOREIGN_FAILURE
        guilty = "" if self._note_parted(generation, node_id, failure) else blamed(failure, node_id)
        if guilty and guilty not in generation.nodes - {self._node.node_id}:
            guilty = node_id
        generation.events.put_nowait(Broken(job_id, failure.code, failure.message, guilty))
        return None

    def _note_parted(self, generation: Generation, node_id: str, failure: LlmFailure) -> bool:
        lost = failure.facts.get("lost")
        if failure.code is LlmCode.NODE_LOST and lost:
            generation.apart.add(frozenset((node_id, lost)))
        return failure.code is LlmCode.NODE_LOST

    def lost(self, node_id: str, reason: str) -> None:
        self.prefixes.forget(node_id)
        for generation in self._under_way:  # if it comes back it is another one
            generation.forgive(node_id)
        self._break(node_id, f"the node {node_id} was lost: {reason}")

    def cut_off(self, node_id: str) -> None:
        """A connection broke and was made anew: what was under way on it may be gone."""
        self._break(node_id, f"the connection to {node_id} broke")

    def _break(self, node_id: str, said: str) -> None:
        for (job_id, node), asking in self._opening.items():
            if node == node_id and not asking.answer.done():
                asking.answer.set_exception(Broken(job_id, LlmCode.NODE_LOST, said))
        for job_id, generation in self._generations.items():
            if node_id in generation.nodes:
                generation.events.put_nowait(Broken(job_id, LlmCode.NODE_LOST, said))

    def done(self, job: Job, event: ProcessorEvent, reason: str) -> None:
        """A pass of one of our jobs is over. (The thread that computes says so.)"""
        generation = self._generations.get(job.job_id)
        if generation is None:
            return
        if event is ProcessorEvent.JOB_COMPLETED:
            generation.tell(Completed(job.job_id))
        elif event in ERRORS:
            generation.tell(Broken(job.job_id, LlmCode[event.name], reason, self._node.node_id))

    def failed_here(self, job_id: bytes, failure: LlmFailure) -> None:
        """A pass of one of our jobs failed on this node. (From any thread.)"""
        if (generation := self._generations.get(job_id)) is not None:
            here = self._node.node_id
            guilty = "" if self._note_parted(generation, here, failure) else blamed(failure, here)
            generation.tell(Broken(job_id, failure.code, failure.message, guilty))

    def watch_over(self, now: float, stalled: Callable[[str], bool]) -> None:
        """Break what has had no sign of life for a step's time."""
        timeout, chunk = self._node.config.step_timeout, self._node.config.prefill_chunk_size
        for job_id, generation in self._generations.items():
            if generation.job is None or now - generation.sign < timeout:
                continue
            limit = self._node.step_limit(generation.hops, generation.step_tokens(chunk))
            if now - generation.sign < limit:
                continue
            generation.sign = now
            others = sorted(generation.nodes - {self._node.node_id})
            guilty = [node for node in others if stalled(node)]
            generation.avoid.update(guilty or self._spared(generation, others))
            over = ", ".join(guilty or others) or "this node"
            reason = f"no step came back for {limit:g} s over {over}"
            generation.events.put_nowait(Broken(job_id, LlmCode.NODE_STALLED, reason))

    def _spared(self, generation: Generation, nodes: list[str]) -> set[str]:
        """Any of these may be to blame: those that the job can do without."""
        spared: set[str] = set()
        for node in nodes:
            if isinstance(self._find(generation, spared | {node}), Route):
                spared.add(node)
        # With none it would go the same way again.
        return spared or set(nodes)

    def _find(self, generation: Generation, without: Collection[str] = ()) -> Route | NoRoute:
        avoid = frozenset({*generation.avoid, *generation.full, *without})
        before = generation.left.hops if generation.left is not None else ()
        return self._node.find(avoid, frozenset(generation.apart), before)

    def break_all(self, reason: str) -> None:
        """Whatever they wait for."""
        code, here = LlmCode.END_MODEL_UNAVAILABLE, self._node.node_id
        self.closing = reason
        for job_id, generation in self._generations.items():
            generation.avoid.add(here)
            generation.events.put_nowait(Broken(job_id, code, reason, here))
        for (job_id, _), asking in self._opening.items():
            if not asking.answer.done():
                asking.answer.set_exception(Broken(job_id, code, reason, here))

    # -- a generation ---------------------------------------------------------------------

    async def _begin(
        self, ask: GenerationRequest, choice: int, watch: ProgressListener | None
    ) -> Generation:
        ids = await asyncio.to_thread(self.text.prompt_of, ask, choice)
        if len(ids) >= self.context:
            raise LlmFailure(
                LlmCode.CONTEXT_EXCEEDED,
                f"the prompt has {len(ids)} tokens, and {self.context} are all that a job may have",
                prompt_tokens=len(ids),
                context=self.context,
            )
        most = min(ask.max_tokens or self.context, self.context - len(ids))
        if is_constrained(ask):  # to a schema or a grammar, which take a while to read
            sampler = await asyncio.to_thread(self.text.sampler, ask, choice)
        else:
            sampler = self.text.sampler(ask, choice)
        return Generation(
            loop=asyncio.get_running_loop(),
            ids=ids,
            prompt_tokens=len(ids),
            max_tokens=most,
            reserve=most if ask.max_tokens else min(most, UNSAID),
            sampler=sampler,
            writer=self.text.writer(ask, most, choice),
            speculation=self._speculation(),
            watch=watch,
        )

    def _speculation(self) -> Speculation | None:
        if self._step_times is None:
            return None
        return Speculation(self._step_times, Lookup(self.text.ends))

    async def _set_out(self, generation: Generation) -> None:
        """Find a way, have room on all of it, and go. A full node is passed over if there is a way
        without it."""
        generation.forget_untold()
        try:
            while True:
                try:
                    return await self._try_route(generation)
                except _NodeFull:  # the others keep its room for it
                    generation.taken = generation.taken or (0, generation.told)
                    left = self._leave(generation, self._node.config.open_timeout)
                    generation.left = left or generation.left
        finally:
            generation.full.clear()

    async def _try_route(self, generation: Generation) -> None:
        """Raises _NodeFull if another way is to be tried."""
        job_id = urandom(16)
        kept, shared = self._kept(generation)
        if kept is None or kept is generation.left:
            hops = (await self._route(generation)).hops
        else:
            hops = kept.hops
            generation.left = replace(kept, ids=kept.ids[:shared])
        generation.hops = hops
        generation.taken = (shared, generation.told) if shared else None
        if not generation.grows:
            generation.timing = JobTiming(wire=self._node.config.wire)
        context = max(self._node.context_of(hops), len(generation.ids) + 1)
        generation.room = min(generation.prompt_tokens + generation.reserve, context)
        self._generations[job_id] = generation
        have = held = shared
        # In the same order everywhere: two jobs never wait for each other's room.
        for node_id in sorted({*generation.nodes, self._node.node_id}):
            answer = await self._open(generation, job_id, node_id, kept, shared)
            have, held = min(have, answer.have), min(held, answer.have or held)
        self._drop_left(generation)
        generation.grows = False
        generation.cached = have if generation.told == 0 else generation.cached
        generation.sign = time.monotonic()

        def prepare(job: Job) -> None:
            job.text = generation.text(have, held)
            generation.job = job

        self._node.submit(job_id, prepare)

    def _kept(self, generation: Generation) -> tuple[CachedPrefix | None, int]:
        """A cache of an earlier turn, unless a way has failed already; or its own. And how many of
        its tokens are the same."""
        if (own := generation.left) is not None:
            return own, min(len(own.ids), len(generation.ids) - 1)
        if generation.avoid or generation.apart or generation.full or generation.told:
            return None, 0
        found = self.prefixes.take(
            generation.tenant, generation.ids, time.monotonic(), self._node.holds
        )
        return found or (None, 0)

    def _drop_left(self, generation: Generation) -> None:
        """What nobody took over of what it left is not wanted any more."""
        left, generation.left = generation.left, None
        if left is not None:
            for node_id, key in left.keys.items():
                self._node.end(node_id, End(job_id=key))

    def _patience(self, generation: Generation) -> float:
        """Until when it waits for a way, and for room on all of its nodes."""
        return generation.waits_until(time.monotonic(), self._node.config.open_timeout)

    async def _route(self, generation: Generation) -> Route:
        until = self._patience(generation)
        while True:
            if self.closing:
                raise LlmFailure(LlmCode.END_MODEL_UNAVAILABLE, self.closing)
            route = self._find(generation)
            if isinstance(route, Route):
                return route
            if generation.full:  # the copies are gone: it waits for one of these
                generation.full.clear()
                continue
            left = until - time.monotonic()
            if left <= 0 or not self._may_wait(generation):
                raise LlmFailure(LlmCode.PIPE_UNAVAILABLE, route.reason)
            generation.note(f"waits: {route.reason}")
            await self._node.changed(left)

    def _may_wait(self, generation: Generation) -> bool:
        """Whether there may be a way later: for who has not begun as for any who comes, for the
        others if the network can give the layers that are missing to another node."""
        return not generation.avoid and (not generation.told or self._node.mends())

    async def _open(
        self,
        generation: Generation,
        job_id: bytes,
        node_id: str,
        kept: CachedPrefix | None,
        shared: int,
    ) -> Opened:
        message = Open(
            job_id=job_id,
            pipe_id=job_id.hex()[:8],
            model=self._node.config.model,
            hops=generation.hops,
            tokens=generation.room,
            reuse=kept.keys.get(node_id) if kept is not None else None,
            deadline=max(0.0, self._patience(generation) - time.monotonic()),
            wire=self._node.config.wire,
            same=shared,
        )
        generation.opened[node_id] = False
        answer = await self.ask(node_id, message)
        generation.opened[node_id] = True
        return answer

    async def ask(self, node_id: str, message: Open) -> Opened:
        """Until a node has room. Raises Broken."""
        config, job_id = self._node.config, message.job_id
        asking = _Asking(asyncio.get_running_loop().create_future())
        self._opening[job_id, node_id] = asking
        try:
            while not asking.answer.done() and not self._node.open(node_id, message):
                if not self._node.knows(node_id):
                    raise Broken(job_id, LlmCode.NODE_LOST, f"the node {node_id} is gone")
                await self._node.changed(config.silence)  # it is back soon, or lost
            done, _ = await asyncio.wait([asking.answer], timeout=config.step_timeout)
            if not done and not asking.waits:  # a node without room answers at once
                raise TimeoutError
            answer = await asyncio.wait_for(asking.answer, message.deadline + config.silence)
        except TimeoutError:
            said = f"{node_id} did not answer in time"
            raise Broken(job_id, LlmCode.NODE_STALLED, said, node_id) from None
        finally:
            del self._opening[job_id, node_id]
        if not answer.ok:
            raise Broken(job_id, code_of(answer.code), answer.reason, node_id)
        return answer

    async def _follow(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        while True:
            event = await generation.events.get()
            if isinstance(event, Wrote):
                generation.first = generation.first or time.monotonic()
                if event.piece is not None:
                    yield event.piece
            elif isinstance(event, Read):
                generation.note(
                    f"read {event.sent} of {event.total} tokens", event.sent / event.total
                )
            elif event.job_id not in self._generations:
                continue  # of a way that was left
            elif isinstance(event, Completed):
                return
            else:
                raise event

    async def _is_over(self, generation: Generation, broken: Broken) -> bool:
        """Leave the way; whether the answer was finished meanwhile, so that nothing was lost.
        Raises LlmFailure if this node itself does not come to an end with what it computes."""
        is_sound = broken.code is not LlmCode.WRONG_COMPUTATION
        left = self._leave(generation, self._node.config.open_timeout if is_sound else 0.0)
        if not is_sound:
            self._drop_left(generation)
        generation.left = left or generation.left
        config, here = self._node.config, self._node.node_id
        own = [hop for hop in generation.hops if hop.node_id == here]
        try:
            limit = self._node.step_limit(own, config.pass_tokens)
            await asyncio.wait_for(self._node.settled(), limit)
        except TimeoutError:
            said = f"{here} itself is stuck in a computation; {broken.reason}"
            raise LlmFailure(LlmCode.NODE_STALLED, said) from broken
        return generation.writer.finished is not None

    def _turn_back(self, generation: Generation, broken: Broken) -> None:
        """Raises what ended it for good, or makes it ready for another way."""
        generation.grows = False
        if broken.code in _GONE and not self._node.holds(generation.hops):
            # Who was lost, has other layers than a moment ago or leaves did nothing wrong.
            is_last, guilty = time.monotonic() > self._patience(generation), ""
        else:
            is_last, guilty = generation.count_route() >= ROUTES, broken.node_id
        if guilty and broken.code not in (LlmCode.NO_ROOM, LlmCode.CONTEXT_EXCEEDED):
            generation.avoid.add(guilty)
        if broken.code not in _AGAIN or is_last or guilty == self._node.node_id:
            raise broken.failure() from broken
        if isinstance(self._find(generation), NoRoute) and not self._may_wait(generation):
            raise broken.failure() from broken
        generation.log(f"{broken.reason}; goes on another way", "warning")
        log.warning("a job goes on another way: %s", broken.reason)

    def _grow(self, generation: Generation) -> bool:
        """All room that was reserved is used: leave, and come back for more. False if it may not
        have more."""
        most = min(
            generation.prompt_tokens + generation.max_tokens,
            self._node.context_of(generation.hops),
        )
        if generation.room >= most:
            return False
        generation.reserve = min(generation.max_tokens, 2 * generation.reserve)
        generation.left = self._leave(generation, self._node.config.open_timeout)
        generation.grows = True
        return True

    def _leave(self, generation: Generation, keep: float = 0.0) -> CachedPrefix | None:
        """Give back what it has on its nodes, or have them keep its caches for this many seconds.
        What they keep."""
        job, generation.job = generation.job, None
        keep = keep if job is not None or generation.taken is not None else 0.0
        kept = None
        for job_id in [
            job_id for job_id, other in self._generations.items() if other is generation
        ]:
            del self._generations[job_id]
            if keep:
                until = time.monotonic() + keep
                # Who was not asked again yet has it as before.
                keys = dict(generation.left.keys) if generation.left is not None else {}
                keys |= {node: job_id for node, is_open in generation.opened.items() if is_open}
                kept = CachedPrefix(
                    keys, generation.tenant, generation.cached_ids, generation.hops, until
                )
            message = End(job_id=job_id, keep=keep > 0, seconds=keep)
            for node_id in generation.opened:
                self._node.end(node_id, message)
        generation.opened = {}
        return kept

    def _said(self, generation: Generation) -> Completion:
        now = time.monotonic()
        first = generation.first or now
        return Completion(
            choice=generation.writer.said(),
            usage=Usage(generation.prompt_tokens, generation.told, generation.cached),
            timings=Timings((first - generation.began) * 1000, (now - first) * 1000),
            hops=generation.timing.hops(),
        )


def _is_cut_short(generation: Generation, broken: Broken) -> bool:
    """Whether it only did not get more room: what was said so far is the answer."""
    if not generation.grows or broken.code not in (
        LlmCode.NO_ROOM,
        LlmCode.CONTEXT_EXCEEDED,
    ):
        return False
    generation.log(f"the answer ends here: {broken.reason}", "warning")
    return True


def _left(generation: Generation) -> list[Delta]:
    """What was written and not yet told."""
    left = []
    while not generation.events.empty():
        event = generation.events.get_nowait()
        if isinstance(event, Wrote) and event.piece is not None:
            left.append(event.piece)
    return left
