"""Messages that wait for the engine: JetStream keeps what is published while nobody listens.

A stream covers subjects, and a durable consumer of each pushes its messages to the engine, which
acknowledges a message when what it says is committed; one that is not acknowledged comes again.
If a stream covers a subject already, as in a deployment that had another control plane, that
one is used. Otherwise a stream of our own keeps each message until it is acknowledged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.core.errors import NotRunning

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

NAME = "PENSTOCK_CAP"
QUEUE = "cordum-scheduler"
_MAX_AGE = 7 * 86_400
"""Seconds after which a message that no engine took is dropped."""
_ACK_WAIT = 5.0
"""Seconds after which a message that was not acknowledged comes again."""
_MAX_UNACKED = 2000
_TIMEOUT = 5.0
_NOT_YET = 10_008
"""JetStream's error while a cluster has no leader."""
Receive = Callable[["Msg"], Awaitable[None]]


class Delivery(Struct, frozen=True):
    """How a message came out of a stream."""

    sequence: int
    """The message's number in its stream: the same when it comes again."""
    stored_at: float
    is_repeated: bool
    receipt: str
    """The subject on which it is acknowledged."""


def delivery_of(message: Msg) -> Delivery:
    told = message.metadata
    return Delivery(
        told.sequence.stream, told.timestamp.timestamp(), told.num_delivered > 1, message.reply
    )


async def subscribe(client: Client, handlers: Mapping[str, Receive], replicas: int) -> bool:
    """Have the messages of these subjects delivered, those of before too.

    False if the server has no JetStream. Raises NotRunning while it can't be used, and errors of
    nats-py."""
    import nats.js.errors
    from nats.js import api

    stream = client.jetstream(timeout=_TIMEOUT)
    try:
        await stream.account_info()
    except nats.js.errors.APIError as error:
        if error.err_code == _NOT_YET:
            raise NotRunning(f"JetStream: {error.description}") from error
        return False
    names = {subject: await _covering(stream, subject) for subject in handlers}
    if missing := [subject for subject, name in names.items() if not name]:
        await stream.add_stream(
            name=NAME,
            subjects=missing,
            retention=api.RetentionPolicy.WORK_QUEUE,
            storage=api.StorageType.FILE,
            max_age=_MAX_AGE,
            num_replicas=replicas,
        )
    for subject, receive in handlers.items():
        durable = f"penstock-{subject.replace('.', '-')}"
        deliver = f"_INBOX.{durable}"
        await client.subscribe(deliver, queue=QUEUE, cb=receive)
        await stream.add_consumer(
            names[subject] or NAME,
            durable_name=durable,
            filter_subject=subject,
            deliver_subject=deliver,
            deliver_group=QUEUE,
            deliver_policy=api.DeliverPolicy.ALL,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=_ACK_WAIT,
            max_ack_pending=_MAX_UNACKED,
        )
    return True


async def _covering(stream: JetStreamContext, subject: str) -> str:
    """The name of the stream that covers a subject; empty if none does."""
    import nats.js.errors

    try:
        return await stream.find_stream_name_by_subject(subject)
    except nats.js.errors.NotFoundError:
        return ""
