"""envoy/envoy.yaml: Envoy takes it, and its limits agree with the filter's."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config import Admission, Config
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


def test_the_table_of_limits_says_what_the_files_say(
    config: dict[str, Any], manager: dict[str, Any], ext_proc: dict[str, Any], clusters: dict[str, Any], tmp_path: Path
) -> None:
    """docs/configuration.md is the one place where all of them stand."""
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    rows = (line.strip("|").split("|") for line in text.partition("## Limits")[2].splitlines() if line.startswith("|"))
    told = {cells[0].strip(): cells[2].strip() for cells in rows}
    (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    defaults = Config()
    buffer = config["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"]
    (thresholds,) = clusters["headway"]["circuit_breakers"]["thresholds"]
    stack_s: float = Stack(tmp_path, [])._filter_config()["gateway"]["max_message_timeout_s"]
    assert stack_s == seconds(ext_proc["max_message_timeout"])
    assert {key: value for key, value in told.items() if key not in ("limit", "---")} == {
        "`per_connection_buffer_limit_bytes`": f"{buffer >> 20} MiB",
        "gRPC message": f"{MAX_MESSAGE_BYTES >> 20} MiB",
        "`message_timeout`": f"{seconds(ext_proc['message_timeout']):g} s",
        "`tokenization.deadline_s`": f"{defaults.tokenization.deadline_s:g} s",
        "`max_message_timeout`": f"{stack_s:g} s",
        "deadline of large bodies": f"{stack_s / 2:g} s",
        "`admission.hold_s`": f"{Admission().hold_s:g} s",
        "`stream_idle_timeout`": f"{seconds(manager['stream_idle_timeout']):g} s",
        "`request_timeout`": f"{seconds(manager['request_timeout']):g} s",
        "route `timeout`": f"{seconds(route['route']['timeout']):g} s",
        "`circuit_breakers` `max_requests`": str(thresholds["max_requests"]),
        "`shutdown.notice_s` + `shutdown.grace_s`": f"{defaults.shutdown.notice_s + defaults.shutdown.grace_s:g} s",
    }


@pytest.mark.parametrize("name", ["envoy.yaml", "full_duplex.yaml", "clusters.yaml"])
def test_a_request_without_a_decision_goes_to_the_living(name: str) -> None:
    """In every example: another engine on retry, and none that has just refused a connection."""
    example = yaml.safe_load(envoy_config_path(name).read_text())
    engines = next(cluster for cluster in example["static_resources"]["clusters"] if cluster["name"] == "engines")
    outliers = engines["outlier_detection"]
    assert outliers["split_external_local_origin_errors"] is True
    assert outliers["consecutive_local_origin_failure"] == 1
    assert outliers["enforcing_consecutive_5xx"] == 0
    assert outliers["max_ejection_percent"] == 100
    assert engines["common_lb_config"]["healthy_panic_threshold"]["value"] < 100 / 64
    chain = example["static_resources"]["listeners"][0]["filter_chains"][0]
    for route in chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"][0]["routes"]:
        (predicate,) = route["route"]["retry_policy"]["retry_host_predicate"]
        assert predicate["name"] == "envoy.retry_host_predicates.previous_hosts"
        assert route["route"]["retry_policy"]["host_selection_retry_max_attempts"] >= 10


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
