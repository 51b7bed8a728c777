"""What a worker says of itself: /info, /health and the figures of /metrics."""

from __future__ import annotations

from msgspec.structs import asdict

from penstock import __version__
from penstock.ports.clock import Clock
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.job import PROTOCOL_VERSION, Mode
from penstock.workloads.container.standing.admission import Admission
from penstock.workloads.container.standing.machine import Machine, disk_of
from penstock.workloads.container.standing.queue import Queue
from penstock.workloads.container.standing.records import Records
from penstock.workloads.container.standing.telemetry import Now
from penstock.workloads.container.standing.watch import EngineWatch
from penstock.workloads.container.store import WorkerHealth, WorkerInfo


class Standing:
    def __init__(
        self,
        config: WorkerConfig,
        machine: Machine,
        watch: EngineWatch,
        queue: Queue,
        admission: Admission,
        records: Records,
        clock: Clock,
    ) -> None:
        self._config, self._machine, self._watch, self._queue = config, machine, watch, queue
        self._admission, self._records, self._clock = admission, records, clock
        self._started_at, self._since = clock.now(), clock.monotonic()
        self.broken = ""
        """What of the worker itself has failed, for good."""

    @property
    def _engine(self) -> str:
        return self._watch.facts.name if self._watch.facts is not None else self._config.engine

    def info(self) -> WorkerInfo:
        config, machine, facts = self._config, self._machine, self._watch.facts
        builds = config.build.enabled and (facts is None or facts.can_build)
        return WorkerInfo(
            worker_id=config.worker_id,
            hostname=machine.hostname,
            os=machine.os,
            os_architecture=machine.architecture,
            protocol_version=PROTOCOL_VERSION,
            cpu_model=machine.cpu_model,
            cpu_cores=machine.cpu_cores,
            cpu_threads=machine.threads,
            memory_mb=machine.memory().total_mb,
            labels=config.labels,
            version=__version__,
            engine=self._engine,
            modes=(Mode.IMAGE, Mode.BUILD) if builds else (Mode.IMAGE,),
            limits={
                "defaults": asdict(config.defaults),
                "most": asdict(config.most),
                "together": asdict(self._queue.room),
            },
        )

    def health(self) -> WorkerHealth:
        config, machine, facts = self._config, self._machine, self._watch.facts
        memory, problems = machine.memory(), self._problems()
        jobs_disk = disk_of(config.jobs_dir)
        root_dir = str(config.docker_root_dir or (facts.root_dir if facts else ""))
        engine_disk = disk_of(root_dir)
        return WorkerHealth(
            status="degraded" if problems else "ok",
            uptime_seconds=int(self._clock.monotonic() - self._since),
            load_average=machine.load_average(),
            running_jobs=self._queue.running,
            max_concurrent_jobs=config.max_concurrent_jobs,
            temperature_c=machine.temperature_c(),
            timestamp_unix_ms=int(self._clock.now() * 1000),
            cpu_threads=machine.threads,
            memory_total_mb=memory.total_mb,
            memory_available_mb=memory.available_mb,
            jobs_path=str(config.jobs_dir.absolute()),
            jobs_disk_total_mb=jobs_disk.total_mb,
            jobs_disk_available_mb=jobs_disk.available_mb,
            docker_root_dir=root_dir,
            docker_disk_total_mb=engine_disk.total_mb,
            docker_disk_available_mb=engine_disk.available_mb,
            queued_jobs=len(self._queue),
            max_queued_jobs=config.max_queued_jobs,
            draining=self._admission.draining,
            accepting=self._admission.closed() is None and not self._admission.full,
            engine={
                "name": self._engine,
                "reachable": self._watch.reachable,
                "version": facts.version if facts else None,
                "runtimes": facts.runtimes if facts else (),
                "error": self._watch.error or None,
            },
            problems=problems,
        )

    def _problems(self) -> tuple[str, ...]:
        closed = self._admission.closed()
        full = f"{self._config.max_queued_jobs} jobs wait, and no more may"
        told = (
            self.broken,
            self._watch.problem,
            closed.error.message if closed is not None else "",
            full if self._admission.full else "",
            self._records.trouble,
        )
        return tuple(sentence for sentence in told if sentence)

    def figures(self) -> Now:
        queue, room = self._queue, self._queue.room
        memory_mb, cpus = queue.held
        return Now(
            version=__version__,
            engine=self._engine,
            started_at=self._started_at,
            queued=len(queue),
            running=queue.running,
            slots=room.jobs,
            engine_up=self._watch.reachable,
            draining=self._admission.draining,
            disk_available_mb=disk_of(self._config.jobs_dir).available_mb,
            memory_mb_free=max(0.0, room.memory_mb - memory_mb),
            cpus_free=max(0.0, room.cpus - cpus),
        )
