"""The Kubernetes Job, the image and the systemd unit name what there is."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from supervisor.cli.main import main
from supervisor.run.torchrun_options import read_command

DEPLOY = Path(__file__).parent.parent / "deploy"
UNIT = DEPLOY / "systemd" / "unbroken-controller@.service"


def test_the_job_runs_what_unbroken_takes() -> None:
    service, job = yaml.safe_load_all((DEPLOY / "kubernetes/job.yaml").read_text())
    spec = job["spec"]
    pod: dict[str, Any] = spec["template"]["spec"]
    (container,) = pod["containers"]
    words = [*container["command"], *container["args"]]
    here = words.index("--")
    assert words[:2] == ["unbroken", "run"]
    known = {name for param in main.commands["run"].params for name in param.opts}
    assert {word.partition("=")[0] for word in words[2:here]} <= known
    given = [re.sub(r"\$\((\w+)\)", "0", word) for word in words[here + 1 :]]
    read = read_command(given, nproc_per_node=None, environment={})
    assert (read.nodes_max, read.node_rank) == (spec["completions"], 0)
    assert spec["completions"] == spec["parallelism"]
    assert read.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert any(word.startswith("--local-addr=") for word in given), "a pod's short host name means nothing to others"
    variables = {one["name"] for one in container["env"]}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(words))) <= variables
    assert pod["restartPolicy"] == "Never", "podFailurePolicy wants it"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    rules = spec["podFailurePolicy"]["rules"]
    assert [one["action"] for one in rules] == ["Ignore", "FailJob"]
    assert rules[1]["onExitCodes"]["containerName"] == container["name"]


def test_the_image_copies_what_the_wheel_is_made_of() -> None:
    text = (DEPLOY / "container/Containerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.M) for word in line.split()}
    assert {"unbroken.py", "diagnosis", "recovery", "supervisor", "docs", "deploy", "pyproject.toml"} <= copied
    assert all((DEPLOY.parent / name).exists() for name in copied)


@pytest.mark.systemd
def test_systemd_takes_the_unit() -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_gives_options_that_there_are() -> None:
    (line,) = re.findall(r"^ExecStart=(.+)$", UNIT.read_text(), re.M)
    known = {name for param in main.commands["controller"].params for name in param.opts}
    assert set(re.findall(r"--[a-z-]+", line)) <= known
