"""The files in deploy/: as far as tools can check them without a cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.cli.commands import Penstock
from tests.support.nats import make_tls_files, program

DEPLOY = Path(__file__).parent.parent / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
BUILT_IN = [p for p in MANIFESTS if p.stem not in ("kustomization", "autoscaling")]


def run(*argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, argv)], capture_output=True, text=True, check=False)


def tool(name: str) -> Path:
    return Path(sys.executable).parent / name


def documents(path: Path) -> Iterator[dict[str, Any]]:
    yield from (one for one in yaml.safe_load_all(path.read_text()) if one)


def containers() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Where, what is run, and its plain environment variables."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        if "penstock" in service["image"]:
            yield f"compose:{name}", service["command"], service.get("environment", {})
    for path in BUILT_IN:
        for document in documents(path):
            spec = document.get("spec", {}).get("template", {}).get("spec", {})
            for one in spec.get("containers", ()):
                plain = {each["name"]: each["value"] for each in one["env"] if "value" in each}
                yield f"{path.stem}:{one['name']}", one["args"], plain


def test_the_compose_file_is_one() -> None:
    done = run(
        tool("check-jsonschema"), "--builtin-schema", "compose-spec", DEPLOY / "compose.yaml"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_nats_accepts_its_configuration_in_the_compose_file(tmp_path: Path) -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    make_tls_files(tmp_path, "127.0.0.1")
    text = compose["configs"]["nats"]["content"].replace("$$", "$").replace("/tls/", f"{tmp_path}/")
    (tmp_path / "nats.conf").write_text(text)
    env = {**os.environ, "NATS_PASSWORD": "s3cret"}
    argv = [program(), "-t", "-c", tmp_path / "nats.conf"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "sync_interval: always" in text


@pytest.mark.parametrize("path", BUILT_IN, ids=lambda path: path.stem)
def test_a_manifest_has_no_field_that_kubernetes_does_not_know(path: Path) -> None:
    done = run(tool("kubernetes-validate"), "--strict", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kustomization_names_files_that_are_there() -> None:
    (kustomization,) = documents(DEPLOY / "kubernetes" / "kustomization.yaml")
    assert {DEPLOY / "kubernetes" / name for name in kustomization["resources"]} <= {*MANIFESTS}


@pytest.mark.parametrize(("where", "argv", "env"), [*containers()], ids=lambda value: str(value))
def test_a_container_runs_a_command_with_settings_that_exist(
    where: str, argv: list[str], env: dict[str, str], tmp_path: Path
) -> None:
    penstock = Penstock(tmp_path)
    named = {key: value for key, value in env.items() if key.startswith("PENSTOCK_")}
    penstock.env |= named | {"PENSTOCK_DATA_DIR": str(tmp_path / "data")}
    told = penstock.json("config", "show")
    assert told
    verbs = [word for word in argv if not word.startswith("-")][: 2 if argv[0] == "worker" else 1]
    options = {word.partition("=")[0] for word in argv if word.startswith("--")}
    help_text = penstock.out(*verbs, "--help")
    assert all(re.search(rf"(?<!\S){option}\b", help_text) for option in options), options


def test_workers_are_scaled_by_metrics_that_the_engine_has() -> None:
    from penstock.api import metrics

    text = (DEPLOY / "kubernetes" / "autoscaling.yaml").read_text()
    (document,) = documents(DEPLOY / "kubernetes" / "autoscaling.yaml")
    (trigger,) = document["spec"]["triggers"]
    names = re.findall(r"penstock_jobs_(\w+)", trigger["metadata"]["query"])
    source = Path(metrics.__file__).read_text()
    assert names
    assert all(f'("{name}", ' in source for name in names)
    assert trigger["metadata"]["ignoreNullValues"] == "false", text


@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").iterdir()), ids=lambda p: p.name)
def test_systemd_finds_no_fault_in_a_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None and not os.environ.get("CI"):
        pytest.skip("systemd-analyze is not installed")
    text = unit.read_text().replace("/opt/penstock/bin/penstock", "/bin/true")
    text = text.replace("WorkingDirectory=/opt/penstock", "WorkingDirectory=/")
    name = unit.name.replace("@.", "@one.")
    (tmp_path / name).write_text(text)
    done = run("systemd-analyze", "verify", "--man=no", tmp_path / name)
    faults = [line for line in done.stderr.splitlines() if name in line]
    assert not faults, faults
