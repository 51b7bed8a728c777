"""What an agent sees of an engine (MCP): a tool for each topic, answers about jobs, resources.

Needs the extra `mcp`, as `mcp` does, which serves all this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, unquote

import mcp_types as types
import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.core.errors import InvalidRequest, NotFound, TooLarge
from penstock.core.job import Job
from penstock.core.pointer import JSON
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import EngineApi, TopicView, newest_try
from penstock.ports.store import JobQuery
from penstock.values import json_schema
from penstock.workloads.pipeline.run_config import check_fields

T = TypeVar("T", bound=Struct)

WAIT = 30.0
"""Seconds that a call waits for its job. Common clients give up after 60."""
MAX_WAIT = 300.0
MAX_LINES = 1000
"""Log lines of one call that are sent, and of one log that is read."""
_INPUT = "input"
_INLINE = 64 << 10
"""Bytes of a result that are part of an answer; a longer one is read as a resource."""
_MAX_RESOURCE = 4 << 20


# -- tools ------------------------------------------------------------------------------------


class Waiting(Struct, frozen=True, forbid_unknown_fields=True):
    job_id: Annotated[str, Meta(description="The job, as a tool returned it.")]
    seconds: Annotated[
        float, Meta(ge=0, le=MAX_WAIT, description="How long to wait for its end, in seconds.")
    ] = WAIT


class OneJob(Struct, frozen=True, forbid_unknown_fields=True):
    job_id: Annotated[str, Meta(description="The job, as a tool returned it.")]


class Cancelling(Struct, frozen=True, forbid_unknown_fields=True):
    job_id: Annotated[str, Meta(description="The job, as a tool returned it.")]
    reason: Annotated[str, Meta(max_length=1000, description="Kept in the job's history.")] = ""


class Listing(Struct, frozen=True, forbid_unknown_fields=True):
    state: Annotated[JobState | None, Meta(description="Only jobs in this state.")] = None
    topic: Annotated[str | None, Meta(description="A glob, as in job.text.*")] = None
    limit: Annotated[int, Meta(ge=1, le=100, description="Maximum number of jobs.")] = 20


class JobError(Struct, frozen=True):
    code: str
    message: str


class JobAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tool answers about one job."""

    job_id: str
    topic: str
    state: JobState
    message: str = ""
    """What it waits for, why it ended as it did, or how to go on."""
    result: Any | UnsetType = UNSET
    """What it returned, if that is JSON and not too long."""
    error: JobError | UnsetType = UNSET
    resources: tuple[str, ...] = ()
    """URIs of what can be read of it: its result, its artifacts, its log."""


class JobAnswers(Struct, frozen=True):
    jobs: list[JobAnswer]


JOB_TOOLS: dict[str, tuple[type[Struct], str]] = {
    "job_status": (OneJob, "Tell where a job is and why, and its result if it has ended."),
    "job_wait": (Waiting, "Wait for the end of a job, and return its result."),
    "job_cancel": (Cancelling, "End a job: what runs is stopped, what waits does not start."),
    "job_list": (Listing, "List your jobs, newest first."),
}
_AMBIGUOUS = re.compile(r"-[0-9a-f]{8}$")


def tool_name(topic: str) -> str:
    """The tool of a topic: `job.text.make_pdf` is `text__make_pdf`.

    It depends on the topic alone, and no two topics have the same. A name that could be read in
    two ways, is too long for common clients or is taken ends in eight digits of the topic's hash.
    """
    words = topic.removeprefix("job.").split(".")
    name = "__".join(words)
    readable = name.split("__") == words and not _AMBIGUOUS.search(name)
    if readable and len(name) <= 64 and name not in JOB_TOOLS:
        return name
    return f"{name[:55]}-{sha256(topic.encode()).hexdigest()[:8]}"


def tool_of(view: TopicView) -> types.Tool:
    return types.Tool(
        name=tool_name(view.topic),
        title=view.topic,
        description="\n\n".join(
            filter(None, (view.description, f"Runs a job of the topic {view.topic}."))
        ),
        input_schema=_object(view.input_schema),
        output_schema=_answer_schema(view.output_schema),
    )


def _object(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """MCP wants an object at the root."""
    return {**(schema or {}), "type": "object"}


def _answer_schema(result: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """That of a JobAnswer whose `result` has this schema."""
    schema = json_schema(JobAnswer)
    own, fields = schema.pop("$defs"), schema["properties"]
    # Written out, so that no name of ours meets one among the definitions of the result.
    fields["state"], fields["error"] = own["JobState"], own["JobError"]
    if result:
        inner = dict(result)
        schema["$defs"] = inner.pop("$defs", {})
        fields["result"] = inner
    return schema


def job_tool(name: str) -> types.Tool:
    kind, sentence = JOB_TOOLS[name]
    reads = name != "job_cancel"
    return types.Tool(
        name=name,
        description=sentence,
        input_schema=_object(json_schema(kind)),
        output_schema=json_schema(JobAnswers) if name == "job_list" else _answer_schema(),
        annotations=types.ToolAnnotations(read_only_hint=reads, destructive_hint=not reads),
    )


def check_input(given: Mapping[str, Any], schema: Mapping[str, Any] | None) -> None:
    """Raise InvalidRequest, naming the field, for arguments that the schema refuses."""
    known = (schema or {}).get("properties", {})
    if schema is None or schema.get("additionalProperties") is not False:
        given = {name: value for name, value in given.items() if name in known}
    if schema is not None:
        check_fields(_INPUT, given, schema)


def read_input(kind: type[T], given: dict[str, Any]) -> T:
    check_input(given, json_schema(kind))
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_INPUT, str(error)) from error


# -- answers ----------------------------------------------------------------------------------


async def job_answer(api: EngineApi, job_id: str, after: str = "") -> types.CallToolResult:
    """The state of a job as a tool result; `after` says how long it was waited for."""
    job = await newest_try(api, await api.get(job_id))
    links = resources_of(job_id, job)
    answer = JobAnswer(
        job_id=job_id,
        topic=job.request.topic,
        state=job.state,
        resources=tuple(uri for _, uri in links),
    )
    replace = msgspec.structs.replace
    if not job.is_final:
        why = await api.why(job_id)
        answer = replace(answer, message=_unfinished(job, why, after))
    elif job.state is JobState.SUCCEEDED:
        pointer = job.result.result_ptr if job.result else None
        value, note = await _value(api, pointer) if pointer else (None, "")
        answer = replace(answer, result=value, message=note or _warning(job))
    else:
        answer = replace(answer, message=_unsuccessful(job), error=_job_error(job))
    failed = job.is_final and job.state is not JobState.SUCCEEDED
    return _result(answer, links, failed=failed)


def _unfinished(job: Job, why: str, after: str) -> str:
    later = "job_wait gets its result, job_cancel ends it"
    if job.hold is not None and not job.hold.approved:
        return f"Not started: {why}. It runs when a person has approved it: {later}."
    return f"{job.state}{after and f' {after}'}: {why}. The job goes on: {later}."


def _unsuccessful(job: Job) -> str:
    verdict, error = job.verdict, _job_error(job)
    if job.state is JobState.DENIED and verdict is not None:
        reason = error.message or verdict.reason
        return f"Denied by the rule {verdict.rule_id}: {reason or 'no reason given'}"
    return f"{job.state}: {error.code or 'no code'}: {error.message or 'no message'}"


def _warning(job: Job) -> str:
    """Error of a job that succeeded partially (PARTIAL)."""
    error = _job_error(job)
    return f"{error.code}: {error.message}" if error.code else ""


def _job_error(job: Job) -> JobError:
    if job.result is None:
        return JobError("", "")
    return JobError(job.result.error_code or "", job.result.error_message or "")


async def _value(api: EngineApi, pointer: str) -> tuple[Any, str]:
    """The job's return value, or why it is not included."""
    stat = await api.stat_blob(pointer)
    if stat.size > _INLINE:
        return UNSET, f"The result has {stat.size:,} bytes: read it as a resource."
    if stat.media_type != JSON:
        return UNSET, f"The result is {stat.media_type}: read it as a resource."
    return msgspec.json.decode(await api.get_blob(pointer)), ""


def _result(
    answer: Struct, links: list[tuple[str, str]], *, failed: bool = False
) -> types.CallToolResult:
    text = msgspec.json.encode(answer)
    content: list[types.ContentBlock] = [types.TextContent(text=text.decode())]
    content += [types.ResourceLink(name=name, uri=uri) for name, uri in links]
    plain = msgspec.json.decode(text)
    return types.CallToolResult(content=content, structured_content=plain, is_error=failed)


def error_answer(message: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=message)], is_error=True)


async def job_list(api: EngineApi, listing: Listing) -> types.CallToolResult:
    states = (listing.state,) if listing.state else ()
    jobs = await api.find(JobQuery(states=states, topic=listing.topic, limit=listing.limit))
    answers = [
        JobAnswer(
            job_id=job.job_id,
            topic=job.request.topic,
            state=job.state,
            message=_unsuccessful(job) if job.is_final and job.result is None else _warning(job),
        )
        for job in jobs
    ]
    return _result(JobAnswers(answers), [])


# -- resources --------------------------------------------------------------------------------

_RESOURCE = re.compile(r"penstock://jobs/([^/]+)/(result|log|artifacts/(.+))")


def resource_templates() -> list[types.ResourceTemplate]:
    templates = (
        ("result", "result", "What a job returned."),
        ("log", "log", "What a job logged, as text: the first lines."),
        ("artifact", "artifacts/{+name}", "A file that a job left."),
    )
    return [
        types.ResourceTemplate(
            name=name, uri_template=f"penstock://jobs/{{job_id}}/{path}", description=sentence
        )
        for name, path, sentence in templates
    ]


def resources_of(job_id: str, job: Job) -> list[tuple[str, str]]:
    """Name and URI of what can be read of a job, by the id that its caller knows."""
    base = f"penstock://jobs/{quote(job_id, safe='')}/"
    if not job.is_final:
        return [(f"log of {job_id}", f"{base}log")]
    artifacts = job.result.artifacts if job.result else ()
    found = [(f"artifact {a.name}", f"{base}artifacts/{quote(a.name)}") for a in artifacts]
    if job.result is not None and job.result.result_ptr:
        found.insert(0, (f"result of {job_id}", f"{base}result"))
    return [*found, (f"log of {job_id}", f"{base}log")]


async def read_resource(api: EngineApi, uri: str) -> tuple[bytes, str]:
    found = _RESOURCE.fullmatch(uri)
    if found is None:
        raise InvalidRequest("uri", f"{uri!r} is not a resource of this server")
    job_id, name = unquote(found[1]), found[3]
    job = await newest_try(api, await api.get(job_id))
    if found[2] == "log":
        lines = await api.read_log(job.job_id, 0, MAX_LINES)
        return "".join(f"{line.level}: {line.text}\n" for line in lines).encode(), "text/plain"
    if not job.is_final:
        raise NotFound(f"job {job_id} is {job.state}: it has no result yet")
    if name is None:
        pointer = job.result.result_ptr if job.result else None
        if not pointer:
            raise NotFound(f"job {job_id} ended {job.state} and has no result")
    else:
        left = {a.name: a.pointer for a in (job.result.artifacts if job.result else ())}
        pointer = left.get(unquote(name))
        if pointer is None:
            raise NotFound(f"job {job_id} left no artifact {unquote(name)!r}")
    stat = await api.stat_blob(pointer)
    if stat.size > _MAX_RESOURCE:
        raise TooLarge(
            "uri",
            f"it has {stat.size:,} bytes; at most {_MAX_RESOURCE:,} are sent",
            hint=f"'penstock result {job_id}' and 'penstock job artifacts {job_id}' have no limit",
        )
    media_type = stat.media_type
    if name is not None and job.result is not None:
        media_type = next(a.media_type for a in job.result.artifacts if a.pointer == pointer)
    return await api.get_blob(pointer), media_type


def is_text(media_type: str) -> bool:
    kind = media_type.partition(";")[0]
    return kind.startswith("text/") or kind == JSON or kind.endswith(("+json", "+xml", "/xml"))
