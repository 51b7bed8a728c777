"""A container worker's file and environment become its config, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import Misconfigured
from penstock.workloads.container.config import WorkerConfig, load_config


def loaded(folder: Path, environ: dict[str, str] | None = None, **values: Any) -> WorkerConfig:
    file = folder / "worker.yaml"
    file.write_text(json.dumps(values))
    return load_config(file, environ or {})


def test_without_a_file_everything_is_as_usual() -> None:
    assert load_config(None, {}) == WorkerConfig()


def test_the_file_is_yaml_in_the_protocols_spelling_too(tmp_path: Path) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("workerId: w7\nmaxConcurrentJobs: 8\nlabels: [a, b]\n# a word\n")
    config = load_config(file, {})
    assert (config.worker_id, config.max_concurrent_jobs) == ("w7", 8)
    assert config.labels == ("a", "b")


@pytest.mark.seed("003", "9.13")
def test_the_environment_wins_over_the_file_and_options_over_both(tmp_path: Path) -> None:
    environ = {"WORKER_ID": "of-the-environment", "WORKER_PORT": "9001"}
    config = loaded(tmp_path, environ, worker_id="of-the-file", max_concurrent_jobs=3)
    assert (config.worker_id, config.port) == ("of-the-environment", 9001)
    assert config.max_concurrent_jobs == 3
    config = load_config(tmp_path / "worker.yaml", environ, {"port": 9002, "engine": None})
    assert (config.port, config.engine) == (9002, "auto")


def test_the_token_comes_from_the_file_from_a_file_of_its_own_or_from_the_environment(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("sesame\n")
    assert loaded(tmp_path, token_file="secret").token == "sesame"
    named = {"WORKER_TOKEN_FILE": str(tmp_path / "secret")}
    assert loaded(tmp_path, named, token="other").token == "sesame"
    assert load_config(None, {"WORKER_TOKEN": "open"}, {"host": "0.0.0.0"}).token == "open"
    assert loaded(tmp_path, {"WORKER_TOKEN": "open"}, token_file="secret").token == "open"


@pytest.mark.parametrize("content", [None, b" \n", b"\xff"])
def test_a_token_file_that_has_none_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    with pytest.raises(Misconfigured, match="token_file"):
        loaded(tmp_path, token_file="secret", host="0.0.0.0")
    with pytest.raises(Misconfigured, match="set one of them"):
        loaded(tmp_path, token_file="secret", token="sesame")


def test_folders_are_taken_from_the_file_and_from_the_environment(tmp_path: Path) -> None:
    config = loaded(tmp_path, jobs_dir="jobs", docker_root_dir="/srv/docker")
    assert (config.jobs_dir, config.docker_root_dir) == (tmp_path / "jobs", Path("/srv/docker"))
    environ = {"WORKER_JOBS_DIR": "/srv/jobs", "DOCKER_ROOT_DIR": "/mnt/docker"}
    config = loaded(tmp_path, environ, jobs_dir="jobs")
    assert (config.jobs_dir, config.docker_root_dir) == (Path("/srv/jobs"), Path("/mnt/docker"))


@pytest.mark.parametrize("name", ["defaults", "max_limits"])
def test_a_limit_that_is_named_leaves_the_others_as_they_are(tmp_path: Path, name: str) -> None:
    usual = getattr(WorkerConfig(), name)
    limits = getattr(loaded(tmp_path, **{name: {"memory_mb": 300}}), name)
    assert limits.memory_mb == 300
    assert limits.max_runtime_seconds == usual.max_runtime_seconds
    assert limits.pids == usual.pids


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prot": 9000}, "there is no setting 'prot'"),
        ({"images": {"allow": []}}, "images: there is no setting 'allow'"),
        ({"max_limits": {"memory": 1}}, "max_limits: there is no limit 'memory'"),
        ({"defaults": {"timeout": 1}}, "defaults: there is no limit 'timeout'"),
        ({"defaults": 7}, "defaults"),
        ({"defaults": {"memory_mb": "1 GB"}}, "defaults.memory_mb"),
        ({"defaults": {"memory_mb": -1}}, "defaults.memory_mb: -1"),
        ({"defaults": {"memory_mb": 9999}}, "at most max_limits.memory_mb (4096)"),
        ({"max_concurrent_jobs": 0}, "max_concurrent_jobs"),
        ({"host": "0.0.0.0"}, "there is no token"),
        ({"images": {"allowed": ["--privileged"]}}, "images.allowed"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(Misconfigured) as refused:
        loaded(tmp_path, **values)
    assert said in str(refused.value)


def test_a_file_that_is_not_there_or_no_map_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="can't be read"):
        load_config(tmp_path / "none.yaml", {})
    for text in ("- a\n", "a: [", "\xff"):
        (tmp_path / "worker.yaml").write_bytes(text.encode("latin-1"))
        with pytest.raises(Misconfigured, match=r"worker\.yaml"):
            load_config(tmp_path / "worker.yaml", {})


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(Misconfigured, match="WORKER_PORT"):
        load_config(None, {"WORKER_PORT": "many"})


def test_options_may_be_paths(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame\n")
    flags = {"socket": tmp_path / "w.sock", "token_file": tmp_path / "token"}
    config = load_config(None, {}, flags)
    assert (config.socket, config.token) == (tmp_path / "w.sock", "sesame")
