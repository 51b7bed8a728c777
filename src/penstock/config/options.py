"""Settings as keyword arguments: `app.run(concurrency=3, http__listen="127.0.0.1:0")`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from penstock.config.settings import (
    BusSettings,
    CapSettings,
    ContainerSettings,
    HttpSettings,
    LimitSettings,
    LinkSettings,
    LogFormat,
    LogLevel,
    ModelSettings,
    NodeDtype,
    NodeSettings,
    OpenaiSettings,
    Pool,
    StorageSettings,
    TelemetrySettings,
    TimeoutSettings,
    UnknownTopics,
    WireFormat,
)
from penstock.ports.store import Durability


class SettingOptions(TypedDict, total=False):
    """Every setting by its name; one of a section, as `http.listen`, is `http__listen`, and a whole
    section is an argument too. None stands for not given. A test compares it with Settings."""

    data_dir: str | Path | None
    store: str | None
    durability: Durability | str | None
    listen: str | Sequence[str] | None
    rules: str | Path | None
    concurrency: int | None
    pipelines: str | Sequence[str] | None
    spools: str | Sequence[str] | None
    unknown_topics: UnknownTopics | str | None
    log_level: LogLevel | str | None
    pools: Mapping[str, Pool | Mapping[str, object]] | None
    http__listen: str | None
    http__certificate: str | Path | None
    http__private_key: str | Path | None
    http__insecure: bool | None
    http__allowed_hosts: str | Sequence[str] | None
    http__cors: str | Sequence[str] | None
    http__rate_limit: float | None
    http__max_body: int | None
    http__max_connections: int | None
    http__max_streams: int | None
    http__access_log: bool | None
    link__listen: str | None
    link__advertise: str | None
    link__authority: str | Path | None
    link__certificate: str | Path | None
    link__private_key: str | Path | None
    link__ca: str | Path | None
    link__fingerprint: str | None
    link__lifetime: float | None
    bus__url: str | None
    bus__start_server: bool | None
    bus__prefix: str | None
    bus__credentials: str | Path | None
    bus__ca: str | Path | None
    bus__certificate: str | Path | None
    bus__private_key: str | Path | None
    cap__enabled: bool | None
    cap__topics: str | Sequence[str] | None
    cap__slots: int | None
    cap__pointers: str | None
    cap__memory: str | None
    cap__keys: str | Path | None
    cap__private_key: str | Path | None
    cap__key_id: str | None
    cap__production: bool | None
    cap__sender_id: str | None
    cap__max_pending: int | None
    cap__jetstream: bool | None
    cap__replicas: int | None
    openai__strict: bool | None
    openai__image_sources: str | Sequence[str] | None
    openai__max_file: int | None
    openai__max_batch_jobs: int | None
    models__serve: str | Sequence[str] | None
    models__dir: str | Path | None
    models__slots: int | None
    models__context: int | None
    models__threads: int | None
    models__memory: int | None
    models__gpu_layers: int | None
    models__tensor_split: str | Sequence[float] | None
    models__projector_gpu: bool | None
    node__model: str | None
    node__source: str | Path | None
    node__layers: str | None
    node__end_model: bool | None
    node__local_layers: int | None
    node__listen: str | None
    node__advertise: str | None
    node__join: str | Sequence[str] | None
    node__key: str | None
    node__node_id: str | None
    node__device: str | None
    node__dtype: NodeDtype | str | None
    node__threads: int | None
    node__memory: int | None
    node__cache: int | None
    node__context: int | None
    node__max_jobs: int | None
    node__max_waiting: int | None
    node__prefill_chunk_size: int | None
    node__pass_tokens: int | None
    node__keep_cache: float | None
    node__wire: WireFormat | str | None
    node__speculation: bool | None
    node__print_times: bool | None
    node__heartbeat: float | None
    node__lease: float | None
    node__step_timeout: float | None
    node__wait_timeout: float | None
    node__drain: float | None
    containers__engine: str | None
    containers__config: str | Path | None
    timeouts__run: float | None
    timeouts__dispatch: float | None
    timeouts__lease: float | None
    timeouts__lost_grace: float | None
    timeouts__reconnect: float | None
    timeouts__kill_grace: float | None
    timeouts__drain: float | None
    limits__max_waiting: int | None
    limits__max_attempts: int | None
    limits__max_input: int | None
    limits__max_result: int | None
    limits__max_artifact: int | None
    limits__max_log_lines: int | None
    limits__max_checkpoint_rows: int | None
    limits__max_checkpoint_bytes: int | None
    storage__retention: float | None
    storage__inline_limit: int | None
    storage__blobs: str | None
    storage__sources: str | Sequence[str] | None
    telemetry__log_format: LogFormat | str | None
    telemetry__otlp_endpoint: str | None
    http: HttpSettings | Mapping[str, object]
    link: LinkSettings | Mapping[str, object]
    bus: BusSettings | Mapping[str, object]
    cap: CapSettings | Mapping[str, object]
    openai: OpenaiSettings | Mapping[str, object]
    models: ModelSettings | Mapping[str, object]
    node: NodeSettings | Mapping[str, object]
    containers: ContainerSettings | Mapping[str, object]
    timeouts: TimeoutSettings | Mapping[str, object]
    limits: LimitSettings | Mapping[str, object]
    storage: StorageSettings | Mapping[str, object]
    telemetry: TelemetrySettings | Mapping[str, object]
