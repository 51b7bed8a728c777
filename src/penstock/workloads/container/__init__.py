"""Jobs in containers: the worker of seed 003, alone behind its own HTTP API or as an executor.

A submission is checked (`protocol/`), gets a folder (`files/`), and is run by a `Runner`
(`running/`) on an `Engine` (`engines/`): the API of Docker or Podman, or an OCI runtime. `Worker`
(`standing/`) queues jobs and keeps their records; `ContainerExecutor` is the same under the control
plane.

What makes a crash harmless: a record says *running* before its container is made, and the
container is removed only after the record says how it ended. So a container without a final
record is to be adopted or ended, and one that is missing was never started.
"""
