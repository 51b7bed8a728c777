"""What can be used, asked for or go wrong is told of, and under one name."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import penstock
from penstock import testing
from penstock.control.safety import EFFECTS, Rule
from penstock.core import errors
from penstock.core.job import Job, JobRequest, JobResult, RetryPolicy, Unique
from penstock.core.journal import Transition
from penstock.core.verdict import ApprovalTerms, Constraints, Hold, SafetyVerdict
from penstock.lifecycles.canonical import ACTORS, JobState, Role
from penstock.ports.engine_api import PARTS, EngineApi
from penstock.ports.executor import CancelToken, Context
from penstock.testing import InMemoryEngine
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.job import ErrorCode, Limits
from penstock.workloads.function.definition import JobFunction
from penstock.workloads.function.options import JobOptions, SubmitOptions
from penstock.workloads.llm.batches import Batches
from penstock.workloads.pipeline.interface import Pipelines
from penstock.workloads.pipeline.retrying import BREAKER_OPEN

SOURCE = Path(penstock.__file__).parent


def section(text: str, heading: str) -> str:
    """The part of a page below a heading, up to the next of its rank or higher."""
    rank = heading.partition(" ")[0]
    found = re.search(rf"^{re.escape(heading)}$(.*?)(?=^#{{1,{len(rank)}}} |\Z)", text, re.M | re.S)
    assert found, f"no heading {heading!r}"
    return found[1]


def first_cells(text: str) -> list[str]:
    """The names in backticks in the first column of the tables in a text."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.M)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


# -- Python API -----------------------------------------------------------------------------


def test_every_public_name_has_a_heading(pages: dict[str, str]) -> None:
    headings = re.findall(r"^### (.+)$", pages["docs/reference/python-api.md"], re.M)
    told = {name for heading in headings for name in re.findall(r"`(\w+)`", heading)}
    assert {*penstock.__all__, *testing.__all__} - told == set()


def test_every_public_method_is_on_the_page(pages: dict[str, str]) -> None:
    page = pages["docs/reference/python-api.md"]
    untold = []
    for kind in (penstock.App, penstock.Client, penstock.JobHandle, Context, InMemoryEngine):
        told = set(re.findall(rf"`{kind.__name__}\.(\w+)", page))
        names = {name for name in vars(kind) if not name.startswith("_")}
        twins = {f"a{name}" for name in told} if kind is InMemoryEngine else set()
        untold += [f"{kind.__name__}.{name}" for name in sorted(names - told - twins)]
    assert untold == []


def test_every_method_of_a_part_is_on_the_page(pages: dict[str, str]) -> None:
    told = section(pages["docs/reference/python-api.md"], "### `Client`")
    untold = []
    workloads = {"Batches": Batches, "Pipelines": Pipelines}  # imported for type checkers only
    for part in PARTS:
        row = re.search(rf"^\| `Client\.{part}` \| (.*) \|$", told, re.M)
        assert row, part
        kind = typing.get_type_hints(vars(EngineApi)[part].fget, None, workloads)["return"]
        methods = [name for name in vars(kind) if not name.startswith("_")]
        untold += [f"{part}.{name}" for name in methods if f"`{name}(" not in row[1]]
    assert untold == []


def test_every_condition_of_a_query_is_on_the_page(pages: dict[str, str]) -> None:
    told = section(pages["docs/reference/python-api.md"], "### `JobQuery`")
    assert set(first_cells(told)) == set(penstock.JobQuery.__struct_fields__)


def test_a_job_function_s_methods_are_on_the_page(pages: dict[str, str]) -> None:
    page = pages["docs/reference/python-api.md"]
    methods = {name for name, _ in inspect.getmembers(JobFunction, inspect.isfunction)}
    assert [name for name in methods if name[0] != "_" and f"`fn.{name}(" not in page] == []


def test_the_cancel_token_s_members_are_on_the_page(pages: dict[str, str]) -> None:
    told = section(pages["docs/reference/python-api.md"], "### `Context`")
    members = [name for name in vars(CancelToken) if not name.startswith("_")]
    assert [name for name in members if f"`{name}" not in told] == []


def test_every_option_is_on_the_page(pages: dict[str, str]) -> None:
    page = pages["docs/reference/python-api.md"]
    defined = first_cells(section(page, "### `App`"))
    submitted = first_cells(section(page, "### Options of a job"))
    assert set(defined) == set(JobOptions.__annotations__)
    assert set(submitted) == set(SubmitOptions.__annotations__)


# -- the job --------------------------------------------------------------------------------


def test_every_field_is_on_the_page(pages: dict[str, str]) -> None:
    page = pages["docs/reference/job.md"]
    for kind in (JobRequest, JobResult, RetryPolicy, Unique, Job, SafetyVerdict, Hold):
        told = first_cells(section(page, f"## {kind.__name__}"))
        assert set(told) == set(kind.__struct_fields__), kind


def test_every_field_of_a_log_entry_is_on_the_page(pages: dict[str, str]) -> None:
    told = first_cells(section(pages["docs/reference/states.md"], "## The log"))
    assert set(told) == set(Transition.__struct_fields__)


def test_who_may_do_what_is_what_the_table_says(pages: dict[str, str]) -> None:
    told = section(pages["docs/reference/states.md"], "## Who may make each transition")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", told, re.M))
    said = {event: {role for role in Role if role.value in who} for event, who in rows.items()}
    assert said == {event.value: set(roles) for event, roles in ACTORS.items()}


def test_every_key_of_a_rule_file_is_on_the_page(pages: dict[str, str]) -> None:
    for heading, keys in (
        ("## The file", {"default", "rules"}),
        ("### `constraints`, of `allow_with_constraints`", {*Constraints.__struct_fields__}),
        ("### `approval`, of `require_approval`", {*ApprovalTerms.__struct_fields__}),
    ):
        assert {*first_cells(section(pages["docs/reference/rules.md"], heading))} == keys, heading


def test_every_key_of_a_rule_is_on_the_page(pages: dict[str, str]) -> None:
    page = pages["docs/reference/rules.md"]
    told = {*first_cells(section(page, "## A rule") + section(page, "## Conditions"))}
    assert told | {*EFFECTS} == {*Rule.__struct_fields__}


# -- errors ---------------------------------------------------------------------------------


def kinds(kind: type[errors.PenstockError]) -> Iterator[type[errors.PenstockError]]:
    yield kind
    for special in kind.__subclasses__():
        yield from kinds(special)


def test_every_exception_is_told_with_its_code(pages: dict[str, str]) -> None:
    told = section(pages["docs/reference/error-codes.md"], "## Exceptions")
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", told, re.M))
    ours = {k.__name__: k.code for k in kinds(errors.PenstockError) if k.__module__ in HOME}
    assert rows == ours
    assert set(rows) - set(penstock.__all__) == set()


HOME = {errors.__name__}
NOT_CODES = {state.value for state in JobState} | {
    "PROTOCOL",
    "NAME",
    "POST",
    "SC_PAGE_SIZE",
    "UNIQUE",
}
"""Words in capitals that no result carries as its error code."""


def codes_in(folder: str) -> Iterator[str]:
    """Every word in capitals in the code of a part: what may become an error code."""
    for path in (SOURCE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"[A-Z][A-Z_]{3,}", node.value)
            ):
                yield node.value


def test_every_error_code_of_a_job_is_told(pages: dict[str, str]) -> None:
    page = pages["docs/reference/error-codes.md"]
    told = {
        *first_cells(section(page, "## Job error codes")),
        *first_cells(section(page, "## Item error codes")),
    }
    parts = ("control", "worker", "workloads/function", "workloads/pipeline")
    made = {code for part in parts for code in codes_in(part)} | {"PARTIAL", "PIPELINE_FAILED"}
    assert made - told - NOT_CODES - signals() == set()
    stale = told - made - {"TIMEOUT", "CANCELLED", "DENIED", "RETRY", BREAKER_OPEN} - call_codes()
    assert stale == set()


def signals() -> set[str]:
    import signal

    return {one.name for one in signal.Signals}


def call_codes() -> set[str]:
    return {kind.code for kind in kinds(errors.PenstockError)}


# -- words ----------------------------------------------------------------------------------


def terms(page: str) -> list[str]:
    return re.findall(r"^\*\*(.+?)\*\*:", page, re.M)


def test_the_glossary_is_in_order_and_has_each_word_once(pages: dict[str, str]) -> None:
    found = terms(pages["docs/glossary.md"])
    assert found == sorted(set(found))


def test_the_glossary_has_the_words_of_the_engine(pages: dict[str, str]) -> None:
    words = {role.value for role in Role} | {
        *("attempt", "durability", "idempotent", "job", "lease", "pool", "priority", "retry"),
        *("state", "store", "tenant", "topic", "transition", "executor", "bus", "engine API"),
    }
    assert words - set(terms(pages["docs/glossary.md"])) == set()


# -- containers -----------------------------------------------------------------------------


def test_every_code_of_a_container_job_is_on_the_page(pages: dict[str, str]) -> None:
    told = first_cells(section(pages["docs/reference/containers.md"], "## Codes"))
    assert sorted(set(ErrorCode) - set(told)) == []


def test_every_limit_of_a_container_job_is_on_the_page(pages: dict[str, str]) -> None:
    told = first_cells(section(pages["docs/reference/containers.md"], "### Limits"))
    assert set(told) == set(Limits.__struct_fields__)


def test_every_setting_of_a_container_worker_is_on_the_page(pages: dict[str, str]) -> None:
    told = first_cells(section(pages["docs/reference/containers.md"], "## The worker's file"))
    wanted = set()
    for field in WorkerConfig.__struct_fields__:
        value = getattr(WorkerConfig(), field)
        inner = getattr(value, "__struct_fields__", ()) if not isinstance(value, Limits) else ()
        wanted |= {f"{field}.{name}" for name in inner} or {field}
    assert set(told) == wanted
