"""Container jobs as values: what one asks for, what becomes of it, and why.

The names of fields, states and codes are the protocol's (docs/reference/containers.md); what
the protocol does not have is added, never put in the place of something it has.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct

from penstock.lifecycles.container import CONTAINER, ContainerJobState

PROTOCOL_VERSION = 1


class Code(StrEnum):
    """Why a job was refused, or how it failed."""

    # Refusals, in the order in which a submission is checked.
    INVALID_BODY = "INVALID_BODY"
    UNSUPPORTED_PROTOCOL_VERSION = "UNSUPPORTED_PROTOCOL_VERSION"
    MISSING_JOB_ID = "MISSING_JOB_ID"
    INVALID_JOB_ID = "INVALID_JOB_ID"
    MISSING_RUNTIME = "MISSING_RUNTIME"
    BAD_RUNTIME_MODE = "BAD_RUNTIME_MODE"
    RUNTIME_NOT_SUPPORTED = "RUNTIME_NOT_SUPPORTED"
    MISSING_IMAGE = "MISSING_IMAGE"
    INVALID_IMAGE = "INVALID_IMAGE"
    INVALID_FIELD = "INVALID_FIELD"
    """A field that can't be what it is; `error.field` names it."""
    NOT_ALLOWED = "NOT_ALLOWED"
    """A field that this worker's policy does not grant; `error.field` names it."""
    IMAGE_NOT_ALLOWED = "IMAGE_NOT_ALLOWED"
    JOB_ID_ALREADY_EXISTS = "JOB_ID_ALREADY_EXISTS"
    IDEMPOTENCY_KEY_REUSED = "IDEMPOTENCY_KEY_REUSED"
    """The key brought another submission before."""
    QUEUE_FULL = "QUEUE_FULL"
    DRAINING = "DRAINING"
    DISK_LOW = "DISK_LOW"
    # Ends of a job.
    TIMEOUT = "TIMEOUT"
    OOM_KILLED = "OOM_KILLED"
    NON_ZERO_EXIT = "NON_ZERO_EXIT"
    IMAGE_NOT_FOUND = "IMAGE_NOT_FOUND"
    IMAGE_PULL_FAILED = "IMAGE_PULL_FAILED"
    COMMAND_NOT_FOUND = "COMMAND_NOT_FOUND"
    COMMAND_NOT_RUNNABLE = "COMMAND_NOT_RUNNABLE"
    """It is there, but can't be executed (exit code 126)."""
    BUILD_FAILED = "BUILD_FAILED"
    INPUT_UNAVAILABLE = "INPUT_UNAVAILABLE"
    OUTPUT_LIMIT = "OUTPUT_LIMIT"
    """It wrote more into its output folder than it may."""
    ENGINE_UNAVAILABLE = "ENGINE_UNAVAILABLE"
    ENGINE_ERROR = "ENGINE_ERROR"
    CANCELLED = "CANCELLED"
    WORKER_RESTARTED = "WORKER_RESTARTED"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    """Something in the worker itself went wrong."""
    DOCKER_ERROR = "DOCKER_ERROR"
    """Only with `compat: strict`: what the protocol calls an engine that can't be reached."""


class Mode(StrEnum):
    IMAGE = "image"
    BUILD = "build"


class StdinMode(StrEnum):
    """What the container reads on its standard input."""

    JOB = "job"
    """The whole job as compact JSON, as the protocol's own worker gives it."""
    PAYLOAD = "payload"
    """`task.payload` as compact JSON, or as it is when it is a string."""
    TEXT = "text"
    """`runtime.stdin.text`."""
    BYTES = "bytes"
    """`runtime.stdin.base64`, decoded."""
    NONE = "none"
    """Nothing: it is at its end from the start."""


class Priority(StrEnum):
    """Which of the waiting jobs starts first; within one, the one that came first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @property
    def rank(self) -> int:
        return _RANKS[self]


_RANKS = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}


class Limits(Struct, frozen=True, kw_only=True):
    """What one job may use; complete: a worker's defaults are filled in."""

    memory_mb: float = 256
    """Memory, and no swap beyond it."""
    max_runtime_seconds: float = 10
    cpus: float = 1
    pids: int = 128
    max_output_bytes: int = 1 << 20
    """Bytes of each of the two streams that are kept, half from the start, half from the end."""
    tmp_mb: float = 64
    """Size of /tmp, which is memory."""
    max_artifact_bytes: int = 64 << 20
    """Bytes that the output folder may hold in all."""
    pull_seconds: float = 300
    """Seconds that fetching the image may take, and again its files; they don't count as run
    time."""


class InputFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file, or an archive of files, below the input folder: given in one of three ways."""

    path: str
    """Relative, normalised; for an archive the folder it is unpacked into ('.' is the top)."""
    text: str | None = None
    base64: str | None = None
    pointer: str | None = None
    """A blob's or another allowed URI, resolved through `Blobs`."""
    archive: str = ""
    """`tar` (also compressed) or `zip`: unpack it."""
    executable: bool = False


class BuildSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`runtime.build`: an image that is made for this job and removed after it."""

    dockerfile: str
    """Its text."""
    context: tuple[InputFile, ...] = ()
    bases: tuple[str, ...] = ()
    """What its FROM lines name, found by the check."""


class ContainerJob(Struct, frozen=True, kw_only=True):
    """A job that was checked: every field is complete and allowed."""

    job_id: str
    mode: Mode = Mode.IMAGE
    image: str = ""
    """As it was given; empty for a build."""
    cmd: tuple[str, ...] = ()
    """Put after the image's entrypoint; none means the image's own."""
    env: dict[str, str] = {}
    limits: Limits = Limits()
    stdin: StdinMode = StdinMode.JOB
    stdin_bytes: bytes = b""
    """What it reads."""
    inputs: tuple[InputFile, ...] = ()
    """Mounted read-only at `INPUT_FOLDER`."""
    outputs: bool = False
    """Whether it has a folder `OUTPUT_FOLDER` to leave artifacts in."""
    build: BuildSpec | None = None
    network: bool = False
    user: tuple[int, int] = (65534, 65534)
    workdir: str = ""
    """Empty means the image's own."""
    runtime: str = ""
    """`runsc`, or whatever the policy of this worker offers; empty means its default."""
    priority: Priority = Priority.NORMAL
    labels: dict[str, str] = {}


INPUT_FOLDER = "/input"
OUTPUT_FOLDER = "/output"


class Stream(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"


class JobError(Struct, frozen=True, omit_defaults=True):
    """`error` of a record or of a refusal."""

    code: str
    message: str
    field: str = ""
    """The path of the field that is wrong, as `runtime.limits.memory_mb`."""


class Usage(Struct, frozen=True, omit_defaults=True):
    """What a container used; None where its engine does not tell."""

    peak_memory_bytes: int | None = None
    cpu_seconds: float | None = None


class StreamCount(Struct, frozen=True):
    """How much of a stream there was, and how much of it is kept."""

    bytes: int = 0
    """Bytes that the container wrote."""
    kept: int = 0
    gap: bool = False
    """Whether some were missed because no worker was there to read them."""

    @property
    def truncated(self) -> bool:
        return self.kept < self.bytes


class Artifact(Struct, frozen=True, omit_defaults=True):
    """A file that a job left in its output folder."""

    path: str
    size: int
    sha256: str
    pointer: str = ""
    """Where the blob is, under the control plane."""


class End(Struct, frozen=True, kw_only=True):
    """How a container job ended."""

    state: ContainerJobState
    exit_code: int | None = None
    """As the protocol has it: of the container; 125 for a missing image and other errors of the
    engine, 126 and 127 for a command that can't be run or found, 137 for a memory kill; None
    after a timeout, a cancel, a restart, and where no engine answers."""
    error: JobError | None = None
    usage: Usage = Usage()
    stdout: StreamCount = StreamCount()
    stderr: StreamCount = StreamCount()
    artifacts: tuple[Artifact, ...] = ()
    skipped: tuple[str, ...] = ()
    """What lay in the output folder and was not collected, each with its reason."""
    image_id: str = ""
    """What the image's name meant."""


class ContainerRecord(Struct, frozen=True, kw_only=True):
    """A job as a worker stores it. Times are Unix seconds."""

    job_id: str
    state: ContainerJobState = CONTAINER.initial
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    exit_code: int | None = None
    error: JobError | None = None
    seq: int = 0
    """The order in which jobs came; given by the store."""
    priority: Priority = Priority.NORMAL
    body: bytes = b""
    """The job as it was submitted, compact JSON, unknown fields and all."""
    image: str = ""
    image_id: str = ""
    """What the image's name meant when the job started."""
    container: str = ""
    """The container's name, set before it is made."""
    engine: str = ""
    memory_mb: float = 0
    cpus: float = 0
    """What it was admitted with."""
    labels: dict[str, str] = {}
    key: str = ""
    """The idempotency key of its submission."""
    usage: Usage = Usage()
    stdout: StreamCount = StreamCount()
    stderr: StreamCount = StreamCount()
    artifacts: tuple[Artifact, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def is_final(self) -> bool:
        return self.state in CONTAINER.final


class Rejected(Exception):
    """A submission that was refused: nothing of it is stored."""

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        field: str = "",
        job_id: Any = None,
        status: int = 400,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.error = JobError(code, message, field)
        self.job_id = job_id
        """As it was given, whatever it was."""
        self.status = status
        self.retry_after = retry_after
