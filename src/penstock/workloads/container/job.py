"""Container jobs as values: what one asks for, what becomes of it, and why.

The names of fields, states and codes are the protocol's (docs/reference/containers.md); what
the protocol does not have is added, never put in the place of something it has.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import Struct

from penstock.lifecycles.container import ContainerJobState

PROTOCOL_VERSION = 1
TOPIC = "job.container.run"


class ErrorCode(StrEnum):
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
    WORKER_LOST = "WORKER_LOST"
    """Its worker is gone, and none on the same machine came back in time."""
    RUNTIME_ERROR = "RUNTIME_ERROR"
    """Something in the worker itself went wrong."""


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


class Limits(Struct, frozen=True, kw_only=True):
    """What one job may use; complete: a worker's defaults are filled in."""

    memory_mb: float = 256
    """Memory, and no swap beyond it."""
    max_runtime_seconds: float = 10
    cpus: float = 1
    pids: int = 128
    max_output_bytes: int = 1 << 20
    """Bytes of each of the two streams in the result, half from the start, half from the end."""
    max_log_bytes: int = 64 << 20
    """Bytes of each stream that are kept, in the same way; beyond `max_output_bytes` as the
    artifacts `stdout.log` and `stderr.log`."""
    tmp_mb: float = 64
    """Size of /tmp, which is memory."""
    shm_mb: float = 64
    """Size of /dev/shm, which is memory."""
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
    archive: str | None = None
    """`tar` (also compressed) or `zip`: unpack it."""
    executable: bool | None = None


class BuildSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`runtime.build`: an image that is made for this job and removed after it."""

    dockerfile: str
    """Its text."""
    context: tuple[InputFile, ...] = ()
    bases: tuple[str, ...] = ()
    """What its FROM lines name, found by the check."""


class Mount(Struct, frozen=True):
    """A folder of this machine in a container."""

    source: Path
    target: str
    read_only: bool = True


class ContainerJob(Struct, frozen=True, kw_only=True):
    """A job that was checked: every field is complete and allowed."""

    job_id: str
    mode: Mode = Mode.IMAGE
    image: str = ""
    """As it was given; empty for a build."""
    cmd: tuple[str, ...] = ()
    """Put after the entrypoint; none means the image's own."""
    entrypoint: tuple[str, ...] | None = None
    """In place of the image's entrypoint and of its command; None means the image's own."""
    env: dict[str, str] = {}
    limits: Limits = Limits()
    stdin: StdinMode = StdinMode.JOB
    stdin_bytes: bytes = b""
    """What it reads."""
    inputs: tuple[InputFile, ...] = ()
    """Mounted read-only at `INPUT_FOLDER`."""
    outputs: bool = False
    """Whether it has a folder `OUTPUT_FOLDER` to leave artifacts in."""
    attach: bool = False
    """Whether its output is also streamed byte for byte, to readers that follow the job."""
    build: BuildSpec | None = None
    network: str = "none"
    """`none`, `bridge`, or the name of a network of the engine."""
    user: tuple[int, int] = (65534, 65534)
    workdir: str = ""
    """Empty means the image's own."""
    gpus: str = ""
    """`all`, a number, or ids; empty means none."""
    mounts: tuple[Mount, ...] = ()
    """Folders of the machine, read-only."""
    read_only: bool = True
    """Whether its root file system is."""
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
    """Bytes that are kept: from the start and, if that is less, from the end."""
    gap: bool = False
    """Whether some were missed because no worker was there to read them."""
    shown: int | None = None
    """Bytes that the text of the result stands for; None: all that are kept."""

    @property
    def truncated(self) -> bool:
        return (self.kept if self.shown is None else self.shown) < self.bytes


class ContainerResult(Struct, frozen=True, kw_only=True):
    """What a container job returns, and leaves behind when it fails."""

    state: ContainerJobState
    exit_code: int | None = None
    """As the protocol has it: of the container; 125 for a missing image and other errors of the
    engine, 126 and 127 for a command that can't be run or found, 137 for a memory kill; None
    after a timeout, a cancel, a restart, and where no engine answers."""
    usage: Usage = Usage()
    """Before the output, so that a reader of the first bytes has it."""
    stdout: str = ""
    """Its first and its last bytes, up to `limits.max_output_bytes`."""
    stderr: str = ""
    error_code: str | None = None
    error_message: str | None = None
    error_field: str = ""
    """The field of the job that is wrong, if that is why."""
    skipped: tuple[str, ...] = ()
    """What was left in the output folder and not kept, with the reason."""
    stdout_count: StreamCount = StreamCount()
    stderr_count: StreamCount = StreamCount()
    image_id: str = ""
    """What the image's name meant."""

    @property
    def error(self) -> JobError | None:
        if self.error_code is None:
            return None
        return JobError(self.error_code, self.error_message or "", self.error_field)


def log_name(stream: Stream) -> str:
    """The artifact with all that is kept of a stream, where the result's text does not have it."""
    return f"{stream}.log"


class Rejected(Exception):
    """A submission that was refused: nothing of it is stored."""

    def __init__(
        self,
        code: ErrorCode,
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
