"""envoy/envoy.yaml: Envoy takes it, and its limits agree with the filter's."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config import Config
from extproc.server import HEALTH_NAMES, MAX_MESSAGE_BYTES
from extproc.stack import EngineSpec, Stack, envoy_config_path, find_envoy
from tests.e2e.harness import chat, quick, running


def validate(path: Path) -> subprocess.CompletedProcess[str]:
    command = [find_envoy(), "--mode", "validate", "-c", str(path), "-l", "error"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(envoy_config_path().read_text())
    return read


@pytest.fixture(scope="module")
def manager(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return found


@pytest.fixture(scope="module")
def ext_proc(manager: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(f for f in manager["http_filters"] if f["name"] == "envoy.filters.http.ext_proc")
    return found["typed_config"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def clusters(config: dict[str, Any]) -> dict[str, Any]:
    return {cluster["name"]: cluster for cluster in config["static_resources"]["clusters"]}


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def test_envoy_takes_the_file_as_it_stands() -> None:
    ended = validate(envoy_config_path())
    assert ended.returncode == 0, ended.stderr


def test_envoy_refuses_a_file_with_a_fault(tmp_path: Path) -> None:
    """Or the test above would not tell anything."""
    text = envoy_config_path().read_text()
    broken = tmp_path / "envoy.yaml"
    broken.write_text(text.replace("failure_mode_allow", "failure_mode_alow"))
    assert broken.read_text() != text
    assert validate(broken).returncode != 0


async def test_envoy_takes_what_the_stack_makes_of_it() -> None:
    async with running([quick("a"), quick("b")]) as bench:
        ended = validate(bench.stack.folder / "envoy.yaml")
        assert ended.returncode == 0, ended.stderr
        assert (await bench.post(chat())).status == 200


async def test_the_stack_changes_nothing_but_addresses(tmp_path: Path, config: dict[str, Any]) -> None:
    """What is tested here is the file that users read."""
    stack = Stack(tmp_path, [EngineSpec("a"), EngineSpec("b"), EngineSpec("c")])
    try:
        for spec in stack.specs:
            await stack.start_engine(spec)
        rendered = stack._envoy_config()
    finally:
        await stack.stop()

    def without_ports(node: object) -> object:
        if isinstance(node, dict):
            return {key: 0 if key == "port_value" else without_ports(value) for key, value in node.items()}
        return [without_ports(item) for item in node] if isinstance(node, list) else node

    assert without_ports(rendered) == without_ports(config)
    assert rendered != config


def test_every_buffer_takes_the_same_body(config: dict[str, Any], clusters: dict[str, Any]) -> None:
    limit = config["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"]
    assert clusters["engines"]["per_connection_buffer_limit_bytes"] == limit
    assert clusters["headway"]["per_connection_buffer_limit_bytes"] == limit


def test_the_filter_receives_the_largest_body_that_envoy_sends(config: dict[str, Any]) -> None:
    limit = config["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"]
    assert limit + 64 * 1024 <= MAX_MESSAGE_BYTES  # headers and framing come on top


def test_envoy_waits_longer_than_a_prompt_may_take_to_read(ext_proc: dict[str, Any]) -> None:
    message_timeout_s = seconds(ext_proc["message_timeout"])
    assert message_timeout_s >= 2 * Config().tokenization.deadline_s
    assert seconds(ext_proc["max_message_timeout"]) >= message_timeout_s


def test_a_filter_that_is_away_stops_nothing(ext_proc: dict[str, Any], clusters: dict[str, Any]) -> None:
    assert ext_proc["failure_mode_allow"] is True
    assert clusters["headway"]["common_lb_config"]["healthy_panic_threshold"]["value"] == 0
    (check,) = clusters["headway"]["health_checks"]
    assert check["grpc_health_check"]["service_name"] in HEALTH_NAMES
    # A draining filter must be known to be one before it stops listening.
    heard_s = (seconds(check["interval"]) + seconds(check["timeout"])) * check["unhealthy_threshold"]
    assert heard_s <= Config().shutdown.notice_s + Config().shutdown.grace_s


def test_streams_are_cut_by_nothing_but_silence(manager: dict[str, Any]) -> None:
    (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert route["route"]["timeout"] == "0s"
    assert seconds(manager["stream_idle_timeout"]) >= 300
    # A retry must not be possible once anything was sent to an engine, but for one that has answered that it is full.
    policy = route["route"]["retry_policy"]
    assert policy["retriable_status_codes"] == [503]
    assert set(policy["retry_on"].split(",")) <= {
        "connect-failure",
        "refused-stream",
        "reset-before-request",
        "retriable-status-codes",
    }


def test_every_circuit_breaker_is_above_what_the_fleet_may_serve(clusters: dict[str, Any]) -> None:
    for cluster in clusters.values():
        (thresholds,) = cluster["circuit_breakers"]["thresholds"]
        assert min(thresholds[key] for key in ("max_connections", "max_pending_requests", "max_requests")) >= 10_000
