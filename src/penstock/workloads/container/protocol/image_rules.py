"""Names of images, and which images a worker's rules mean.

    name            alpine, team/tool, registry.example:5000/team/tool
    name:tag        without a tag it is `latest`
    name@digest     sha256: and 64 hex digits; a tag beside it says nothing
    sha256:…        an image's id, as an engine that has it calls it

Whatever is no such name never reaches an engine, so none can be taken for an option. A rule is a
name, `name:*`, or `*` (any image). What a rule *grants* needs a sure match: of the very name that
the job uses and, for a digest, of the image that the name turned out to mean. What a rule *demands*
(gVisor) holds for an image under whatever name it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.workloads.container.engine import EngineError, Image
from penstock.workloads.container.job import ContainerJob, ErrorCode

if TYPE_CHECKING:
    from penstock.workloads.container.config import ImageRules, WorkerConfig

MAX_REFERENCE = 255
ANY = "*"
ANY_TAG = ":*"

_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?"
_REFERENCE = re.compile(
    rf"(?P<name>(?:{_HOST}/)?{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}))?",
    re.ASCII,
)
_ID = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_BARE_ID = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Reference(Struct, frozen=True):
    """An image's name in its parts; two that mean the same are equal."""

    name: str = ""
    """With its registry, if it names one; empty for an id."""
    tag: str = ""
    """`latest` if none was written; empty beside a digest, which is what counts then."""
    digest: str = ""
    id: str = ""

    @property
    def repository(self) -> str:
        """The name without a registry: what remains of it wherever it comes from."""
        first, _, rest = self.name.partition("/")
        path = rest if rest and _names_host(first) else self.name
        return path.removeprefix("library/")


def parse_reference(text: str) -> Reference:
    """Take a name apart, or raise ValueError with a sentence."""
    if not text:
        raise ValueError("is empty")
    if len(text) > MAX_REFERENCE:
        raise ValueError(f"is {len(text)} characters long; at most {MAX_REFERENCE} are allowed")
    if text.startswith("-"):
        raise ValueError("begins with a dash")
    if any(char.isspace() for char in text):
        raise ValueError("has a space in it")
    if _ID.fullmatch(text):
        return Reference(id=text)
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise ValueError("is not a name of an image: [registry/]name[:tag][@sha256:…]")
    # Engines take these for the beginning of an image's id, whatever it is the id of.
    if found["name"] in ("sha256", "sha512") or _BARE_ID.fullmatch(text):
        raise ValueError("is a part of an id: write sha256: and all of its 64 digits")
    digest = found["digest"] or ""
    tag = "" if digest else found["tag"] or "latest"
    return Reference(name=found["name"], tag=tag, digest=digest)


def check_pattern(pattern: str) -> None:
    """Raise ValueError for a rule that can match nothing: for reading a configuration."""
    if pattern != ANY:
        parse_reference(pattern.removesuffix(ANY_TAG))


def _names_host(first: str) -> bool:
    return "." in first or ":" in first or first == "localhost" or first != first.lower()


# -- rules --------------------------------------------------------------------------------------

SANDBOX = "runsc"
"""The runtime of gVisor, stronger than those that share the machine's kernel."""

_HEX = frozenset("0123456789abcdef")


class NotAllowedImage(EngineError):
    """What the job's image turned out to be is not what the rules pin."""

    code = ErrorCode.IMAGE_NOT_ALLOWED


def matches(pattern: str, reference: str, image: Image | None = None) -> bool:
    """Whether the rule surely means this image. Without `image` a digest must stand in the
    reference itself; with it, what the image is decides."""
    if pattern == ANY:
        return True
    named = _parsed(reference)
    if named is None:
        return False
    if pattern.endswith(ANY_TAG):
        return bool(named.name) and named.name == pattern.removesuffix(ANY_TAG)
    wanted = _parsed(pattern)
    if wanted is None:
        return False
    if wanted.id:
        return wanted.id == (named.id if image is None else image.id)
    if wanted.digest:
        return named.name == wanted.name and wanted.digest in _digests(named, image)
    return named == wanted


def could_match(pattern: str, reference: str) -> bool:
    """Whether it may turn out to match once the image is known."""
    if matches(pattern, reference):
        return True
    wanted, named = _parsed(pattern), _parsed(reference)
    if wanted is None or named is None:
        return False
    if wanted.id:
        return not named.id
    return bool(wanted.digest) and wanted.name == named.name


def granted(patterns: Iterable[str], reference: str, image: Image | None = None) -> bool:
    return any(matches(pattern, reference, image) for pattern in patterns)


def check_resolved(rules: ImageRules, reference: str, image: Image) -> None:
    """Raise NotAllowedImage unless the image that the name means is one that jobs may run."""
    if _is_start_of_id(reference, image):
        raise NotAllowedImage(
            f"{reference} is not an image's name here, but the beginning of another image's id"
        )
    if not granted(rules.allowed, reference, image):
        raise NotAllowedImage(
            f"{reference} is {image.id} here, which is not what this worker's list of images pins"
        )


def must_be_sandboxed(
    rules: ImageRules, references: Iterable[str], image: Image | None = None
) -> bool:
    """Whether a rule demands gVisor for any of these names, or for any other name of the image."""
    names = [*references]
    if image is not None:
        names += [image.id, *image.tags, *image.digests]
    return any(_concerns(pattern, name) for pattern in rules.sandboxed for name in ("", *names))


def chosen_runtime(config: WorkerConfig, job: ContainerJob, image: Image | None = None) -> str:
    """The runtime for a job's container; empty means the engine's own choice."""
    if must_be_sandboxed(config.images, names_of(job), image):
        return SANDBOX
    return job.runtime or config.runtime


def is_weaker(runtime: str, than: str) -> bool:
    return than == SANDBOX and runtime != SANDBOX


def names_of(job: ContainerJob) -> tuple[str, ...]:
    """What a job runs: its image, or what it builds on."""
    return job.build.bases if job.build is not None else (job.image,)


@lru_cache(4096)
def _parsed(text: str) -> Reference | None:
    try:
        return parse_reference(text)
    except ValueError:
        return None


def _digests(named: Reference, image: Image | None) -> set[str]:
    """What the image is known by. One that was imported has an id and no digest."""
    if image is None:
        return {named.digest}
    return {image.id, *(digest.rpartition("@")[2] for digest in image.digests)}


def _concerns(pattern: str, name: str) -> bool:
    """A match that rather errs on the side of yes: the registry is left aside."""
    if matches(pattern, name):
        return True
    wanted, named = _parsed(pattern.removesuffix(ANY_TAG)), _parsed(name)
    if wanted is None or named is None:
        return False
    if wanted.id or named.id:
        return (wanted.id or wanted.digest) == (named.id or named.digest)
    if wanted.repository != named.repository:
        return False
    return pattern.endswith(ANY_TAG) or not named.tag or not wanted.tag or wanted.tag == named.tag


def _is_start_of_id(reference: str, image: Image) -> bool:
    """Engines complete a short id, so a name of such digits may come to mean any image."""
    if not set(reference) <= _HEX or not image.id.startswith(f"sha256:{reference}"):
        return False
    wanted = _parsed(reference)
    return not any(_parsed(tag) == wanted for tag in image.tags)
