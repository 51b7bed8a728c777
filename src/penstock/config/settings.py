"""What can be set, and where an engine keeps its things.

A field of Settings whose type is a Section is a table of the settings file; the others stand at its
top. The sentence below each field is its documentation: docs/reference/settings.md is made of
them. `penstock.config.load` makes checked Settings; a Struct alone checks nothing.
"""

from __future__ import annotations

import os
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import replace

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


class LogFormat(StrEnum):
    """How log lines are written."""

    TEXT = "text"
    JSON = "json"


class NodeDtype(StrEnum):
    """What a split model is computed in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"


class WireFormat(StrEnum):
    """How hidden states of a split model go from node to node."""

    EXACT = "exact"
    HALF = "16bit"
    EIGHT = "8bit"


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


class Section(Struct, frozen=True, kw_only=True):
    """Settings that belong together: a table of the settings file."""


class HttpSettings(Section, frozen=True, kw_only=True):
    """The HTTP API, and the pages that it serves."""

    listen: str = ""
    """Address of the HTTP API, as `127.0.0.1:7470`. Empty means that there is none, except that
    `penstock up` then takes 127.0.0.1:7470, or a free port if that one is taken."""
    certificate: Path | None = None
    """The file of the certificate (PEM) with which HTTP is served over TLS."""
    private_key: Path | None = None
    """The file of the certificate's private key (PEM)."""
    insecure: bool = False
    """Whether HTTP may listen beyond this machine's loopback without TLS."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names by which HTTP may be addressed; none means any, or, on loopback, only
    `localhost` and loopback addresses."""
    cors: tuple[str, ...] = ()
    """Origins of web pages that may call it with a key, as `http://localhost:3000`; `*` is any."""
    rate_limit: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    """Requests per second that one key may make; 0 means no limit."""
    max_body: Size = 8 << 20
    """Maximum size of a request's body, in bytes; for a blob or a batch of jobs
    `limits.max_input` is the maximum."""
    max_connections: Annotated[int, Meta(ge=1, le=100_000)] = 10_000
    """Maximum number of open connections."""
    max_streams: Annotated[int, Meta(ge=1, le=100_000)] = 2000
    """Maximum number of open event streams, over all keys; one key gets a quarter."""
    access_log: bool = False
    """Whether each request is logged: client, principal, method, path, status and time."""


class LinkSettings(Section, frozen=True, kw_only=True):
    """Workers and clients on other machines, over TLS."""

    listen: str = ""
    """Address for other machines, as `0.0.0.0:7480`; empty means that there is none."""
    advertise: str = ""
    """The HOST:PORT at which other machines reach it, for join tokens; without one it is `listen`,
    if that names a host."""
    authority: Path | None = None
    """The folder with the key of the authority that the engine makes; by default `<data_dir>/link`.
    All engines of one PostgreSQL database must share it."""
    certificate: Path | None = None
    """The file of a certificate of your own (PEM) for the engine, or for a worker that connects to
    it. Without one the engine makes its own, and a worker gets one when it joins."""
    private_key: Path | None = None
    """The file of that certificate's private key (PEM)."""
    ca: Path | None = None
    """The file of the authority (PEM) of the other side's certificate. An engine with a certificate
    of your own needs it as well, and lets workers in that have a certificate of this authority:
    their common name is the worker's id."""
    fingerprint: str = ""
    """For a client without the file: `sha256:` and the fingerprint of the authority that the engine
    made."""
    lifetime: Annotated[float, Meta(ge=60, le=3650 * DAY)] = 90 * DAY
    """Seconds for which a worker's certificate is valid; it is renewed after half of that. A worker
    that was away for longer has to join again."""


class BusSettings(Section, frozen=True, kw_only=True):
    """A NATS server through which workers on other machines reach the engine."""

    url: str = ""
    """The address, as `nats://127.0.0.1:4222` or, on another machine, `tls://host:4222`; several
    servers of a cluster with commas between; a user and password or a token inside, as
    `tls://user:password@host:4222`. Empty means that there is none."""
    start_server: bool = False
    """Whether the engine starts that NATS server itself, on this machine, at
    `nats://127.0.0.1:4222` unless `url` names another address; it asks for the engine's token."""
    prefix: str = "penstock"
    """How all subjects begin. Engines that share a NATS server need different ones."""
    credentials: Path | None = None
    """The file of NATS credentials: `.creds`, a user's JWT and its key, or the seed of an NKEY."""
    ca: Path | None = None
    """The file of the authority (PEM) of the server's certificate; without one, the system's."""
    certificate: Path | None = None
    """The file of a certificate (PEM) to show to the server."""
    private_key: Path | None = None
    """The file of that certificate's private key (PEM)."""

    @property
    def address(self) -> str:
        return self.url or ("nats://127.0.0.1:4222" if self.start_server else "")


class CapSettings(Section, frozen=True, kw_only=True):
    """Clients and workers that speak CAP (`cordum.agent.v1`), on the NATS server of `bus.url`."""

    enabled: bool = False
    """Whether the engine is a control plane for CAP. Without `keys`, every user who may publish on
    the NATS server may submit jobs for every tenant."""
    topics: tuple[str, ...] = ()
    """Topics of workers that never announce themselves; those of jobs that came over CAP are
    learned."""
    slots: Annotated[int, Meta(ge=1, le=10_000)] = 64
    """How many jobs workers that never announce themselves are given at once, in all."""
    pointers: str = ""
    """HOST:PORT at which `redis://ctx:` and `redis://res:` are served over the Redis protocol, with
    the engine's token as password; empty means that others serve them, and the engine passes
    pointers on unread."""
    memory: str = ""
    """For a worker under another CAP control plane: the address of the Redis server,
    `redis://host:6379/0`, to which the memory pointers of that plane lead."""
    keys: Path | None = None
    """The folder of public keys (ECDSA P-256) of everybody who may speak; with it, every packet
    must be signed. `SENDER_ID.pem`; `SENDER_ID=KEY_ID.pem` for one of several keys; both in a
    folder `TENANT` for a sender that may speak for that tenant alone."""
    private_key: Path | None = None
    """The file of the key (PEM) with which the engine signs its own packets."""
    key_id: str = ""
    """The id of that key; empty: the id of the component that signs."""
    production: bool = False
    """Whether every packet about a job must have, and gets, a signature of CAP's production
    profile. Needs `keys` and `private_key`. Without it, such signatures are accepted too."""
    sender_id: str = "penstock"
    """The engine's name on the bus."""
    max_pending: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    """Jobs of one tenant that may wait to be accepted; more are refused."""
    jetstream: bool = True
    """Whether submissions and results come out of a JetStream stream, if the server has JetStream:
    those that are sent while the engine is away are kept."""
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    """How many servers of a NATS cluster keep that stream."""


class OpenaiSettings(Section, frozen=True, kw_only=True):
    """The OpenAI API, and its files and batches."""

    strict: bool = False
    """Whether an unknown field of a request is refused; else it is ignored, and the header
    `x-penstock-warning` names it."""
    image_sources: tuple[str, ...] = ()
    """URL prefixes, as `https://example.com/images/`, below which images are fetched that requests
    to language models name by URL; none means that only `data:` URIs are accepted."""
    max_file: Size = 200 << 20
    """Maximum size of an uploaded file, in bytes."""
    max_batch_jobs: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    """Maximum number of unfinished jobs of one batch; its other lines wait in its file."""


class TimeoutSettings(Section, frozen=True, kw_only=True):
    """How long things may take, in seconds."""

    run: Seconds = 3600.0
    """Seconds that an attempt may run, unless the job has a `timeout` of its own."""
    dispatch: Seconds = 300.0
    """Seconds that a worker may hold a job before it starts it."""
    lease: Annotated[float, Meta(ge=1, le=3600)] = 15.0
    """Seconds that a silent worker is still presumed alive."""
    lost_grace: GraceSeconds = 3.0
    """Seconds that a worker has to come back after its connection dropped; at most the lease."""
    reconnect: GraceSeconds = 60.0
    """Seconds that a client's call waits for an engine whose connection was lost, unless the call
    has a timeout."""
    kill_grace: GraceSeconds = 5.0
    """Seconds that work has to end by itself after it was asked to, before it is killed."""
    drain: GraceSeconds = 30.0
    """Seconds that running jobs have to finish when their engine or worker stops; after that they
    are asked to end."""


class LimitSettings(Section, frozen=True, kw_only=True):
    """How many, and how large."""

    max_waiting: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 1_000_000
    """Maximum number of waiting jobs; a submission beyond that is refused. 0 means no limit."""
    max_attempts: Annotated[int, Meta(ge=1, le=1000)] = 5
    """How often an idempotent job may lose its worker before it ends TIMEOUT."""
    max_input: Size = 64 << 20
    """Maximum size of a job's input, in bytes."""
    max_result: Size = 64 << 20
    """Maximum size of a job's result, in bytes."""
    max_artifact: Annotated[int, Meta(ge=1, le=1 << 50)] = 16 << 30
    """Maximum size of one artifact, in bytes."""
    max_log_lines: Annotated[int, Meta(ge=0, le=10_000_000)] = 10_000
    """Maximum number of log lines that are kept of each job."""
    max_checkpoint_rows: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 1_000_000
    """Maximum number of rows that a job may checkpoint; a row that replaces another counts once."""
    max_checkpoint_bytes: Size = 1 << 30
    """Maximum size of the checkpointed rows of a job, in bytes."""


class StorageSettings(Section, frozen=True, kw_only=True):
    """Payloads, and how long everything is kept."""

    retention: Annotated[float, Meta(ge=0, le=3650 * DAY)] = 7 * DAY
    """Seconds for which finished jobs, their payloads, files and batches are kept; 0 means for
    ever."""
    inline_limit: Annotated[int, Meta(ge=0, le=12_000)] = 4096
    """Bytes up to which a payload is stored in its pointer instead of a file."""
    blobs: str = ""
    """Where payloads are that are not stored in their pointer: a folder, by default
    `<data_dir>/blobs`, or the URL of an object store that fsspec can write to, as
    `s3://bucket/penstock` (install its package, as `s3fs`). All engines of one PostgreSQL database
    must share it."""
    sources: tuple[str, ...] = ()
    """URI prefixes below which a job may point to others' data, as `s3://bucket/in`;
    `file:` pointers are followed in `<data_dir>/files` and in folders listed here."""


class TelemetrySettings(Section, frozen=True, kw_only=True):
    """What the engine tells other systems about its jobs."""

    log_format: LogFormat = LogFormat.TEXT
    """How `penstock up` and `penstock worker` write their log on standard error: `text`, or `json`,
    an object on each line with the id of the job and of its trace."""

    otlp_endpoint: str = ""
    """The OpenTelemetry collector to which the traces of jobs are sent (OTLP over HTTP), as
    `http://127.0.0.1:4318`; empty means that none are. Headers and certificates are read from the
    environment variables `OTEL_EXPORTER_OTLP_*`."""


class ContainerSettings(Section, frozen=True, kw_only=True):
    """Container jobs (`job.container.run`)."""

    engine: str = ""
    """The container engine: `auto`, `docker`, `podman`, `oci`, or the address of a socket, as
    `unix:///run/docker.sock`; empty means that no container jobs are run here."""
    config: Path | None = None
    """The YAML file that says what container jobs may do, as for `penstock container serve`."""


class ModelSettings(Section, frozen=True, kw_only=True):
    """Language models (`job.llm.<model>`, and the OpenAI API)."""

    serve: tuple[str, ...] = ()
    """The models that are served: names of `penstock model`, or files; `auto` means all of them,
    none that none is served."""
    dir: Path | None = None
    """The folder of the models; without one it is `models` in the user's data folder, shared by
    all engines."""
    slots: Annotated[int, Meta(ge=1, le=256)] = 8
    """How many answers one model computes at once."""
    context: Annotated[int, Meta(ge=0, le=16_777_216)] = 0
    """Maximum length of one answer with its prompt, in tokens; 0 means 8192, less if the model was
    made for less or memory is short."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads that compute for one model; 0 means one for each core."""
    memory: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    """Bytes that all loaded models may take together; 0 means three quarters of the machine's."""
    gpu_layers: Annotated[int, Meta(ge=-1, le=100_000)] = -1
    """Layers of a model that llama.cpp computes on GPUs: 0 means none, -1 as many as its build and
    the memory of the GPUs allow."""
    tensor_split: tuple[Annotated[float, Meta(ge=0)], ...] = ()
    """How the layers are divided between several GPUs, as proportions (`[3, 1]`); none means by
    their memory."""
    projector_gpu: bool = True
    """Whether the projector of a model with vision is on a GPU, if there is one."""


class NodeSettings(Section, frozen=True, kw_only=True):
    """The node of a split model that runs here (`job.chat.<model>`)."""

    model: str = ""
    """The model that is split over nodes: a name of `penstock model` or a part of it, a GGUF file,
    or a folder; empty means that there is no node here. The network knows it by the name that is
    given, or by that of the file or folder."""
    source: Path | None = None
    """The GGUF file or folder with the model's weights, if `model` is to be its name and nothing
    else."""
    layers: str = "auto"
    """The layers that the node holds, as `0-14` or `0-4,20-29`; `auto` lets the network decide,
    `none` holds none."""
    end_model: bool = False
    """Whether text is handled here: the model can then be asked here, and its tokenizer, embedding
    and head are on this node."""
    local_layers: Annotated[int, Meta(ge=0, le=100_000)] = 1
    """Of an end model: how many of the first layers are computed beside it, so that what leaves
    is never an embedding as such."""
    listen: str = "127.0.0.1:0"
    """Address for other nodes, as `0.0.0.0:7471`; port 0 takes any free one."""
    advertise: str = ""
    """The HOST:PORT at which other nodes reach it, if that is not where it listens."""
    join: tuple[str, ...] = ()
    """Addresses of running nodes, as `10.0.0.5:7471`; one that answers is enough. Workers of the
    same engine find each other without."""
    key: str = ""
    """The network's key (`penstock node key`), or `@` and the file that it is in; without one it
    is read from `<data_dir>/pipe.key`, and made there at first."""
    node_id: str = ""
    """The node's name, unique in its network; made from the host's name if empty."""
    device: str = ""
    """What the node computes on: `cpu`, `cuda:0`, `mps`. If empty, the fastest one that is there,
    by a short timing of one layer on each."""
    dtype: NodeDtype = NodeDtype.AUTO
    """The data type of the computation; `auto` takes the faster one of float32 and bfloat16 on this
    machine, and 16 bits on an accelerator. `int8` means weights of eight bits, a quarter of the
    memory; on a CPU only."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads that compute; 0 means that the number is measured."""
    memory: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    """Bytes that the node's weights and caches may take; 0 means three quarters of the
    machine's."""
    cache: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    """Bytes of `memory` for caches; 0 means a quarter of what is left beside the weights, at most
    4 GiB."""
    context: Annotated[int, Meta(ge=16, le=16_777_216)] = 4096
    """Maximum length of one answer with its prompt, in tokens; less if the model was made for
    less."""
    max_jobs: Annotated[int, Meta(ge=1, le=100_000)] = 64
    """Maximum number of jobs that are open on the node; more wait, with that reason."""
    max_waiting: Annotated[int, Meta(ge=0, le=1_000_000)] = 256
    """Maximum number of jobs that wait for room on the node; more are refused."""
    prefill_chunk_size: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    """Tokens of a prompt that go through the nodes at once."""
    pass_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 512
    """Maximum number of tokens, of all jobs, that are computed in one forward pass."""
    keep_cache: Annotated[float, Meta(ge=0, le=30 * DAY)] = 300.0
    """Seconds for which the cache of a finished job is kept for a next turn, unless its room is
    needed; 0 keeps none."""
    wire: WireFormat = WireFormat.EXACT
    """Of an end model: how hidden states go from node to node for its jobs. `16bit` and `8bit` need
    less of a slow link and change answers a little; the error is measured and shown with the
    job."""
    speculation: bool = True
    """Of an end model: whether tokens that followed the same words before are proposed and computed
    along with the newest one, where measured times say that it is faster (speculative decoding)."""
    print_times: bool = False
    """Whether the timing statistics of every job are logged."""
    heartbeat: Annotated[float, Meta(ge=0.01, le=3600)] = 1.0
    """Seconds between two heartbeats of a node."""
    lease: Annotated[float, Meta(ge=0.05, le=3600)] = 5.0
    """Seconds that a silent node is still presumed alive."""
    step_timeout: Annotated[float, Meta(ge=0.1, le=3600)] = 30.0
    """Seconds that one step of a job may take on its way round the nodes. A step that takes longer
    by their measured speed, such as a part of a long prompt, gets up to twenty times as much."""
    wait_timeout: Annotated[float, Meta(ge=0.1, le=DAY)] = 60.0
    """Seconds that a job may wait in all: for all layers to be held, and for room on the nodes."""
    drain: GraceSeconds = 30.0
    """Seconds that running jobs have to finish when the node stops."""


class Settings(Struct, frozen=True, kw_only=True):
    """Everything about an engine that can be set."""

    data_dir: Path = field(default_factory=default_data_dir)
    """The folder in which the engine keeps everything; one engine at a time can use it."""
    store: str = ""
    """Where jobs are kept: empty for a SQLite file in data_dir, or a PostgreSQL database, as
    `postgresql://user@host/database` (with `?schema=name` if several engines share it)."""
    durability: Durability = Durability.DISK
    """What an acknowledged job survives: power loss, the process's death, or nothing."""
    listen: tuple[str, ...] = ("unix:",)
    """Addresses for clients and workers: `unix:` (the socket in data_dir), `unix:/path` or
    `tcp://127.0.0.1:PORT`, which also needs the token that the engine leaves in data_dir."""
    rules: Path | None = None
    """The file of safety rules; without one every job is allowed."""
    concurrency: Annotated[int, Meta(ge=1, le=10_000)] = 32
    """How many jobs the engine's own worker, or a worker process, runs at once."""
    pipelines: tuple[str, ...] = ()
    """Pipelines that are served besides the application's, as `module:name`."""
    spools: tuple[str, ...] = ()
    """Folders of spool servers on this machine. The dashboard and `GET /v1/spools` show how many
    jobs each of their folders holds."""
    unknown_topics: UnknownTopics = UnknownTopics.REFUSE
    """Whether a job whose topic no worker serves is refused, or held until one does."""
    log_level: LogLevel = LogLevel.INFO
    """Records of Python's `logging` from this level on, made inside a job, go to its log. What a
    job prints always does."""
    pools: dict[str, Pool] = field(default_factory=dict)
    """The pools by name; workers that name none join the pool `default`, always there."""
    http: HttpSettings = HttpSettings()
    link: LinkSettings = LinkSettings()
    bus: BusSettings = BusSettings()
    cap: CapSettings = CapSettings()
    openai: OpenaiSettings = OpenaiSettings()
    models: ModelSettings = ModelSettings()
    node: NodeSettings = NodeSettings()
    containers: ContainerSettings = ContainerSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    limits: LimitSettings = LimitSettings()
    storage: StorageSettings = StorageSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    def changed(self, **changes: Any) -> Settings:
        """A copy with these settings; one of a section as `http__listen=""`. Checks nothing."""
        for name in [name for name in changes if "__" in name]:
            section, _, field_name = name.partition("__")
            before = changes.get(section, getattr(self, section))
            changes[section] = replace(before, **{field_name: changes.pop(name)})
        return replace(self, **changes)

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
        return self.models.dir or default_data_dir() / "models"

    @property
    def pipe_key_file(self) -> Path:
        """The key of a network of nodes, if no setting has it; mode 0600."""
        return self.data_dir / "pipe.key"

    @property
    def link_dir(self) -> Path:
        """Where workers keep their certificates."""
        return self.data_dir / "link"

    @property
    def authority_dir(self) -> Path:
        """Where the engine keeps the key of its authority."""
        return self.link.authority or self.link_dir

    @property
    def containers_dir(self) -> Path:
        """Where container jobs have their folders, and the `oci` engine its images."""
        return self.data_dir / "containers"

    @property
    def blobs(self) -> Path | str:
        """A folder, or the URL of an object store."""
        said = self.storage.blobs
        if "://" in said:
            return said
        return Path(said).expanduser() if said else self.data_dir / "blobs"

    @property
    def files(self) -> Path:
        """The folder whose files a job may name with `file:`.

        Not the whole data directory, which also holds the token and the database.
        """
        return self.data_dir / "files"

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
        """`storage.sources`, and the folder that is always allowed."""
        return (self.files.as_uri(), *self.storage.sources)


def fits_socket(path: Path) -> bool:
    return len(os.fsencode(path)) <= MAX_SOCKET_PATH
