"""Jobs in containers: the worker of seed 003, as an executor of the engine.

A submission is checked (`protocol/`), gets a folder (`files/`), and is run by a `Runner` on a
`ContainerEngine` (`engines/`): the API of Docker or Podman, or an OCI runtime.
`ContainerExecutor` does that for canonical jobs; `ContainerHost` knows what is on this machine.

What makes a crash harmless: a job says durably where its container is before that is started, and
the container is removed only after the job's end is recorded. So a container of a job that has not
ended is reattached to, and one that is missing was never started.
"""
