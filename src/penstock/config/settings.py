"""What can be set, and where an engine keeps its things.

The sentence below each field is its documentation: docs/reference/settings.md is made of
them. `penstock.config.load` makes checked Settings; a Struct alone checks nothing.
"""

from __future__ import annotations

import os
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from penstock.core.check import DAY, MAX_TIMEOUT
from penstock.ports.store import Durability

MAX_SOCKET_PATH = 103
"""Bytes a Unix socket's path may have: 107 on Linux, 103 on macOS, the same for all here."""

Seconds = Annotated[float, Meta(ge=0.001, le=MAX_TIMEOUT)]
GraceSeconds = Annotated[float, Meta(ge=0, le=3600)]
Size = Annotated[int, Meta(ge=1, le=16 << 30)]


class UnknownTopics(StrEnum):
    """What becomes of a job whose topic no pool and no worker serves."""

    REFUSE = "refuse"
    HOLD = "hold"


class LogLevel(StrEnum):
    """How grave a record of Python's `logging` is."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class PipeDtype(StrEnum):
    """What a split model is computed in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


class Pool(Struct, frozen=True, forbid_unknown_fields=True):
    """A set of workers that serve the same topics."""

    topics: tuple[str, ...] = ()
    """The topics (globs) that it serves; none means whatever its workers announce."""
    capacity: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """How many jobs it may hold at once; none means as many as its workers can."""
    labels: dict[str, str] = field(default_factory=dict)
    """What its workers have in common, for rules and for people."""


def default_data_dir() -> Path:
    import platformdirs

    return Path(os.path.realpath(platformdirs.user_data_path("penstock", appauthor=False)))


class Settings(Struct, frozen=True, kw_only=True):
    """Everything about an engine that can be set."""

    data_dir: Path = field(default_factory=default_data_dir)
    """The folder in which the engine keeps everything; one engine at a time can use it."""
    durability: Durability = Durability.DISK
    """What an acknowledged job survives: power loss, the process's death, or nothing."""
    listen: tuple[str, ...] = ("unix:",)
    """Where clients and workers connect: `unix:` (the socket in data_dir), `unix:/path` or
    `tcp://127.0.0.1:PORT`, which also needs the token that the engine leaves in data_dir."""
    http: str = ""
    """Where the HTTP API listens, as `127.0.0.1:7470`; empty means nowhere, except that
    `penstock up` then takes 127.0.0.1:7470, or a free port if that one is taken."""
    http_certificate: Path | None = None
    """The file of the certificate (PEM) with which HTTP is served over TLS."""
    http_private_key: Path | None = None
    """The file of the certificate's private key (PEM)."""
    http_insecure: bool = False
    """Whether HTTP may listen beyond this machine's loopback without TLS."""
    http_hosts: tuple[str, ...] = ()
    """Host names by which HTTP may be addressed; none means any, or, on loopback, only
    `localhost` and loopback addresses."""
    http_rate: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    """HTTP requests a second that one key may make; 0 means as many as it likes."""
    http_max_body: Size = 8 << 20
    """Bytes that the body of an HTTP request may have; a blob or a batch of jobs may have
    max_input."""
    http_max_connections: Annotated[int, Meta(ge=1, le=100_000)] = 10_000
    """How many HTTP connections may be open at once."""
    http_max_streams: Annotated[int, Meta(ge=1, le=100_000)] = 2000
    """How many event streams may be open at once, over all keys; one key gets a quarter."""
    openai_strict: bool = False
    """Whether the OpenAI API refuses a field that it does not know; else it ignores the field, and
    the header `x-penstock-warning` names it."""
    image_sources: tuple[str, ...] = ()
    """URL prefixes, as `https://example.com/images/`, below which images that requests to language
    models name by URL are fetched; none means that only `data:` URIs are taken."""
    pools: dict[str, Pool] = field(default_factory=dict)
    """The pools by name; workers that name none join the pool `default`, always there."""
    rules: Path | None = None
    """The file of safety rules; without one every job is allowed."""
    unknown_topics: UnknownTopics = UnknownTopics.REFUSE
    """Whether a job that nobody serves is refused, or held until somebody does."""
    max_waiting: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 1_000_000
    """How many jobs may wait; a submission beyond that is refused. 0 means any number."""
    timeout: Seconds = 3600.0
    """Seconds an attempt may run, unless the job says otherwise."""
    dispatch_timeout: Seconds = 300.0
    """Seconds a worker may hold a job before it starts it."""
    lease: Annotated[float, Meta(ge=1, le=3600)] = 15.0
    """Seconds of silence after which a worker counts as lost."""
    lost_grace: GraceSeconds = 3.0
    """Seconds a worker has to come back after its connection dropped; at most the lease."""
    reconnect_timeout: GraceSeconds = 60.0
    """Seconds that a client's call waits for an engine that was lost, unless it has a timeout."""
    kill_grace: GraceSeconds = 5.0
    """Seconds that work has to end by itself after it was asked to, before it is killed."""
    drain_timeout: GraceSeconds = 30.0
    """Seconds that running jobs have to end by themselves when their engine or worker stops; after
    that they are asked to end."""
    max_attempts: Annotated[int, Meta(ge=1, le=1000)] = 5
    """How often an idempotent job may lose its worker before it ends TIMEOUT."""
    inline_limit: Annotated[int, Meta(ge=0, le=12_000)] = 4096
    """Bytes up to which a payload rides in its pointer instead of a file."""
    max_input: Size = 64 << 20
    """Bytes that a job's input may have."""
    max_result: Size = 64 << 20
    """Bytes that a job's result may have."""
    max_artifact: Annotated[int, Meta(ge=1, le=1 << 50)] = 16 << 30
    """Bytes that one file may have which a job leaves as an artifact."""
    sources: tuple[str, ...] = ()
    """The URI prefixes below which a job may point to others' data, as `s3://bucket/in`;
    `file:` pointers are followed in `<data_dir>/files` and in folders listed here."""
    retention: Annotated[float, Meta(ge=0, le=3650 * DAY)] = 7 * DAY
    """Seconds for which finished jobs and their payloads are kept, and files and batches; 0 means
    for ever."""
    max_file: Size = 200 << 20
    """Bytes that a file for a batch may have."""
    batch_jobs: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    """How many jobs of one batch may be unfinished at a time; its other lines wait in its file."""
    concurrency: Annotated[int, Meta(ge=1, le=10_000)] = 32
    """How many jobs the engine's own worker runs at once."""
    pipelines: tuple[str, ...] = ()
    """Pipelines that are served besides the application's, as `module:name`."""
    containers: str = ""
    """The engine for container jobs (`job.container.run`): `auto`, `docker`, `podman`, `oci`, or
    the address of a socket, as `unix:///run/docker.sock`; empty means that none are run here."""
    container_config: Path | None = None
    """The YAML file that says what container jobs may do, as for `penstock container serve`."""
    models: tuple[str, ...] = ()
    """The language models that are served (`job.llm.<model>`, and the OpenAI API): names of
    `penstock models`, or files; `auto` means all of them, none that none is served."""
    models_dir: Path | None = None
    """The folder of the models; without one it is `models` in the user's data folder, shared by
    all engines."""
    model_slots: Annotated[int, Meta(ge=1, le=256)] = 8
    """How many answers one model computes at once."""
    model_context: Annotated[int, Meta(ge=0, le=16_777_216)] = 0
    """Tokens that one answer may have with its prompt; 0 means 8192, less if the model was made
    for less or memory is short."""
    model_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads that compute for one model; 0 means one for each core."""
    model_memory: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    """Bytes that all loaded models may take together; 0 means three quarters of the machine's."""
    model_gpu_layers: Annotated[int, Meta(ge=-1, le=100_000)] = -1
    """Layers of a model that llama.cpp computes on GPUs: 0 means none, -1 as many as its build and
    the memory of the GPUs allow."""
    model_tensor_split: tuple[Annotated[float, Meta(ge=0)], ...] = ()
    """How the layers are divided between several GPUs, as proportions (`[3, 1]`); none means by
    their memory."""
    model_projector_gpu: bool = True
    """Whether the projector of a model with vision is on a GPU, if there is one."""
    pipe_model: str = ""
    """The language model that is split over nodes, one of which is here (`job.chat.<model>`): a
    name of `penstock models` or a part of it, a GGUF file, or a folder; empty means
    that there is no node here. The network knows it by the name that is given, or by that of the
    file or folder."""
    pipe_source: Path | None = None
    """The GGUF file or folder with the model's weights, if pipe_model is to be its name and
    nothing else."""
    pipe_layers: str = "auto"
    """The layers that the node holds, as `0-14` or `0-4,20-29`; `auto` lets the network decide,
    `none` holds none."""
    pipe_end_model: bool = False
    """Whether text is handled here: the model can then be asked here, and its tokenizer, embedding
    and head are on this node."""
    pipe_local_layers: Annotated[int, Meta(ge=0, le=100_000)] = 1
    """Of an end model: how many of the first layers are computed beside it, so that what leaves
    is never an embedding as such."""
    pipe_listen: str = "127.0.0.1:0"
    """Where the node listens for others, as `0.0.0.0:7471`; with port 0 it is any free one."""
    pipe_advertise: str = ""
    """The HOST:PORT at which other nodes reach it, if that is not where it listens."""
    pipe_join: tuple[str, ...] = ()
    """Addresses of nodes that are there already, as `10.0.0.5:7471`; one that answers is enough.
    Workers of the same engine find each other without."""
    pipe_key: str = ""
    """The network's key (`penstock pipe key`), or `@` and the file that it is in; without one it
    is read from `<data_dir>/pipe.key`, and made there at first."""
    pipe_node_id: str = ""
    """The node's name, unique in its network; made up from the host's name if empty."""
    pipe_dtype: PipeDtype = PipeDtype.AUTO
    """What is computed in; `auto` takes what is fastest here of float32 and bfloat16. `int8` are
    weights of eight bits, a quarter of the memory."""
    pipe_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads that compute; 0 is chosen by measurement."""
    pipe_memory: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    """Bytes that the node's weights and caches may take; 0 means three quarters of the
    machine's."""
    pipe_cache: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    """Bytes of it for caches; 0 means a quarter of what is left beside the weights, at most
    4 GiB."""
    pipe_context: Annotated[int, Meta(ge=16, le=16_777_216)] = 4096
    """Tokens that one answer may have with its prompt; less if the model was made for less."""
    pipe_max_jobs: Annotated[int, Meta(ge=1, le=100_000)] = 64
    """Jobs that the node has open at once; more wait, with that reason."""
    pipe_max_waiting: Annotated[int, Meta(ge=0, le=1_000_000)] = 256
    """Jobs that may wait for room on the node; more are refused."""
    pipe_chunk: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    """Tokens of a prompt that go through the nodes at once."""
    pipe_pass: Annotated[int, Meta(ge=1, le=1_000_000)] = 512
    """Tokens of all jobs that are computed in one pass."""
    pipe_keep: Annotated[float, Meta(ge=0, le=30 * DAY)] = 300.0
    """Seconds for which the cache of a finished job is kept for a next turn, unless its room is
    needed; 0 keeps none."""
    pipe_spot_check: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """How likely a job is to be preceded by a check of one node's computation."""
    pipe_print_times: bool = False
    """Whether the timing statistics of every job are logged."""
    pipe_ping: Annotated[float, Meta(ge=0.01, le=3600)] = 1.0
    """Seconds between two signs of life of a node."""
    pipe_silence: Annotated[float, Meta(ge=0.05, le=3600)] = 5.0
    """Seconds without one after which a node is taken for lost."""
    pipe_step_timeout: Annotated[float, Meta(ge=0.1, le=3600)] = 30.0
    """Seconds that one step of a job may take on its way round the nodes. A step that takes longer
    by their measured speed, such as a part of a long prompt, gets up to twenty times as much."""
    pipe_open_timeout: Annotated[float, Meta(ge=0.1, le=DAY)] = 60.0
    """Seconds that a job may wait in all: for all layers to be held, and for room on the nodes."""
    pipe_drain: GraceSeconds = 30.0
    """Seconds that a node which leaves gives the jobs it has."""
    max_log_lines: Annotated[int, Meta(ge=0, le=10_000_000)] = 10_000
    """How many lines of output are kept of each job."""
    log_level: LogLevel = LogLevel.INFO
    """Records of Python's `logging` from this level on, made inside a job, go to its log. What a
    job prints always does."""
    max_steps: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 1_000_000
    """How many rows a job may checkpoint; a row that replaces another counts once."""
    max_step_bytes: Size = 1 << 30
    """Bytes that the checkpointed rows of a job may have."""

    @property
    def database(self) -> Path:
        return self.data_dir / "penstock.db"

    @property
    def lock_file(self) -> Path:
        """Locked by the process that has the engine."""
        return self.database.with_suffix(".lock")

    @property
    def model_folder(self) -> Path:
        """Where models are kept."""
        return self.models_dir or default_data_dir() / "models"

    @property
    def pipe_key_file(self) -> Path:
        """The key of a network of nodes, if no setting has it; mode 0600."""
        return self.data_dir / "pipe.key"

    @property
    def containers_dir(self) -> Path:
        """Where container jobs have their folders, and the `oci` engine its images."""
        return self.data_dir / "containers"

    @property
    def blobs(self) -> Path:
        return self.data_dir / "blobs"

    @property
    def files(self) -> Path:
        """The folder whose files a job may name with `file:`.

        Not the whole data directory, which also holds the token and the database.
        """
        return self.data_dir / "files"

    @property
    def shelf(self) -> Path:
        """Where files for batches, and the records of batches, are kept."""
        return self.data_dir / "openai"

    @property
    def starts(self) -> Path:
        """Where workers on this machine write down what they begin."""
        return self.data_dir / "starts"

    @property
    def token_file(self) -> Path:
        """Token required from TCP clients; the engine creates the file with mode 0600."""
        return self.data_dir / "token"

    @property
    def socket(self) -> Path:
        """The engine's own Unix socket.

        In a data directory whose path is too long for one, it is a file in a private folder
        under /tmp, named by a hash of that path and by nothing from the environment, so
        that the engine and its clients come to the same place.
        """
        inside = self.data_dir / "penstock.sock"
        if fits_socket(inside):
            return inside
        name = sha256(os.fsencode(self.data_dir)).hexdigest()[:24]
        return Path("/tmp", f"penstock-{os.getuid()}", f"{name}.sock")

    @property
    def addresses(self) -> tuple[str, ...]:
        """`listen`, with the socket's path written out."""
        return tuple(f"unix:{self.socket}" if a == "unix:" else a for a in self.listen)

    @property
    def allowed_sources(self) -> tuple[str, ...]:
        """`sources`, and the folder that is always allowed."""
        return (self.files.as_uri(), *self.sources)


def fits_socket(path: Path) -> bool:
    return len(os.fsencode(path)) <= MAX_SOCKET_PATH
