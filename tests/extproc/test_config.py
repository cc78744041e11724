"""The config file: every fault is named with its place, all of them at once, and nothing else is ever raised."""

import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config import BadConfig, Config, EngineSettings, load_config, notes, parse_config
from predictor.engines import reuse
from predictor.engines.vllm import Settings
from predictor.kv_events import Tier
from predictor.pool_cache import CacheSpec

GOOD = """\
listen:
  grpc: 0.0.0.0:9002
  admin: "[::1]:9464"
tokenization: {threads: 3, max_pending: 10, deadline_s: 0.25}
tickets: {max_age_s: 100}
shutdown: {notice_s: 0, grace_s: 1.5}
probe: {interval_s: 0}
pools:
  - name: llama
    models: [llama-3, llama]
    tokenizer: models/llama
    learning: {min_samples: 4, share: 0.2}
    retry_after: {cap_s: 30}
    workers:
      - name: w0
        endpoint: 10.0.0.1:8000
        kv_events: tcp://10.0.0.1:5557
        kv_replay: tcp://10.0.0.1:5558
        settings: {block_size: 32, num_gpu_blocks: 1000}
      - {name: w1, endpoint: engine.example:80}
  - name: qwen
"""


Rule = Literal["vllm", "sglang", "tensorrt_llm"]
TOP = "gateway, learned, listen, pools, probe, recording, shutdown, tickets, tokenization"


def faults(text: str) -> list[str]:
    with pytest.raises(BadConfig) as caught:
        parse_config(text, "f.yaml")
    return caught.value.faults


def worker_fault(line: str) -> list[str]:
    return faults(f"pools:\n- name: p\n  workers:\n  - name: w\n    endpoint: h:1\n    {line}\n")


def test_a_pool_whose_workers_all_drain_is_noted() -> None:
    text = "pools: [{name: p, workers: [{name: w, endpoint: '127.0.0.1:1', drain: true}]}]"
    said = "pool 'p': all of its workers drain, so that its requests are answered with 503"
    assert said in list(notes(parse_config(text, "f")))


def test_a_good_file_says_what_it_says() -> None:
    config = parse_config(GOOD, "f.yaml")
    assert (config.listen.grpc, config.listen.admin) == ("0.0.0.0:9002", "[::1]:9464")
    assert (config.tokenization.threads, config.tokenization.deadline_s) == (3, 0.25)
    assert (config.shutdown.notice_s, config.probe.interval_s, config.tickets.max_age_s) == (0, 0, 100)
    llama, qwen = config.pools
    assert (llama.model_names, qwen.model_names) == (["llama-3", "llama"], ["qwen"])
    assert (llama.learning.min_samples, llama.learning.share, llama.retry_after.cap_s) == (4, 0.2, 30)
    w0, w1 = llama.workers
    assert (w0.kv_events, w0.kv_replay) == ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")
    assert w0.settings.for_engine() == Settings(block_size=32, num_gpu_blocks=1000, async_scheduling=True)
    assert (w1.kv_events, w1.settings) == (None, EngineSettings())


def test_what_is_told_of_a_cache_is_what_the_fleet_gets() -> None:
    text = """pools:
- name: p
  workers:
  - name: w
    endpoint: h:1
    cache: {speculative: true, cache_hit_alignment: 528, host_blocks: 100, host_us_per_token: 5, host_store: lmcache}
  - {name: s, endpoint: "h:2", cache: {rule: sglang}}
  - {name: plain, endpoint: "h:3"}
"""
    workers = parse_config(text, "f.yaml").pools[0].workers
    told, sglang, plain = (worker.cache.for_engine() for worker in workers)
    assert told.rule == reuse.vllm(speculative=True, cache_hit_alignment=528)
    assert (told.host_blocks, told.storage_blocks, told.stores) == (100, None, {Tier.HOST: "lmcache"})
    assert told.host_s_per_token == pytest.approx(5e-6)
    assert told.storage_s_per_token == pytest.approx(60e-6)
    assert sglang.rule == reuse.sglang()
    assert plain.rule == CacheSpec().rule
    assert plain.host_s_per_token == pytest.approx(CacheSpec().host_s_per_token)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("cache: {rule: trtllm}", "cache.rule"),
        ("cache: {host_blocks: 0}", "cache.host_blocks"),
        ("cache: {storage_us_per_token: -1}", "cache.storage_us_per_token"),
        ("cache: {cache_hit_alignment: -16}", "cache.cache_hit_alignment"),
        ("cache: {host_store: ''}", "cache.host_store"),
        ("cache: {gpu_blocks: 5}", "cache"),
    ],
)
def test_what_is_told_wrongly_of_a_cache_is_named(line: str, field: str) -> None:
    (fault,) = worker_fault(line)
    assert fault.startswith(f"f.yaml:6: pools[0].workers[0].{field}")


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n", "{}", "null", "pools: []"])
def test_an_empty_file_is_all_defaults(text: str) -> None:
    assert parse_config(text, "f.yaml") == Config()


@pytest.mark.parametrize(
    ("text", "deadline_s"),
    [
        ("{}", None),
        ("gateway: {max_message_timeout_s: 5}", 2.5),
        ("gateway: {max_message_timeout_s: 0.6}", None),
        ("{gateway: {max_message_timeout_s: 5}, tokenization: {deadline_s: 3}}", None),
    ],
)
def test_a_large_body_gets_half_of_what_envoy_would_wait_at_most(text: str, deadline_s: float | None) -> None:
    assert parse_config(text, "f.yaml").large_deadline_s == deadline_s


def test_defaults_of_engines_are_those_of_the_predictor() -> None:
    assert EngineSettings(async_scheduling=False).for_engine() == Settings()


@pytest.mark.parametrize(
    ("settings", "family", "is_async"),
    [
        (EngineSettings(), "vllm", True),
        (EngineSettings(device="cpu"), "vllm", False),
        (EngineSettings(device="cpu", async_scheduling=True), "vllm", True),
        (EngineSettings(async_scheduling=False), "vllm", False),
        (EngineSettings(device="cpu"), "sglang", True),
        (EngineSettings(async_scheduling=False), "sglang", False),
        (EngineSettings(device="cpu"), "tensorrt_llm", True),
    ],
)
def test_steps_overlap_where_engines_do_it_by_default(
    settings: EngineSettings, family: Literal["vllm", "sglang", "tensorrt_llm"], is_async: bool
) -> None:
    assert settings.for_engine(family).async_scheduling is is_async
    assert ("async_scheduling" in settings.left_open) is (settings.async_scheduling is None)


@pytest.mark.parametrize("text", ["[]", "5", "text", "- pools: []", "!!set {a}"])
def test_a_file_that_is_no_mapping(text: str) -> None:
    assert faults(text) == ["f.yaml:1: the file: expected keys and values"]


def test_all_faults_are_told_at_once_each_with_its_place() -> None:
    text = """\
listen:
  grpc: nowhere
  admon: x
tokenization:
  threads: 0
tickets: 7
pools:
  - name: p
    learning:
      share: 2
    workers:
      - name: w
        endpoint: h
      - endpoint: h:1
        kv_events: tcp://*:5557
  - 3
  - models: [p]
surprise: 1
"""
    assert sorted(faults(text)) == sorted(
        [
            "f.yaml:2: listen.grpc: expected host:port",
            "f.yaml:3: listen.admon: unknown key; known here: admin, grpc",
            "f.yaml:5: tokenization.threads: expected `int` >= 1 and <= 1000000000000",
            "f.yaml:6: tickets: expected keys and values",
            "f.yaml:10: pools[0].learning.share: expected `float` > 0.0 and <= 1.0",
            "f.yaml:13: pools[0].workers[0].endpoint: expected host:port",
            "f.yaml:14: pools[0].workers[1]: the key 'name' is missing",
            "f.yaml:15: pools[0].workers[1].kv_events: expected a ZMQ address to connect to, such as "
            "tcp://host:5557 (no *)",
            "f.yaml:16: pools[1]: expected keys and values",
            "f.yaml:17: pools[2]: the key 'name' is missing",
            "f.yaml:17: pools[2].models: model 'p' is already named at pools[0].models",
            "f.yaml:18: surprise: unknown key; known here: " + TOP,
        ]
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("listen: {grcp: h:1}", "f.yaml:1: listen.grcp: unknown key; known here: admin, grpc"),
        ("a:\n b: 1\n", "f.yaml:1: a: unknown key; known here: " + TOP),
        (
            "pools:\n- name: p\n  retry_after:\n    cap: 1\n",
            "f.yaml:4: pools[0].retry_after.cap: unknown key; known here: cap_s, jitter",
        ),
        (
            "pools:\n- name: p\n  worker: []\n",
            "f.yaml:3: pools[0].worker: unknown key; known here: admission, fairness, learning, models, name, "
            "retry_after, routing, scores, "
            "tokenizer, workers",
        ),
    ],
)
def test_an_unknown_key_lists_the_known_ones(text: str, fault: str) -> None:
    assert faults(text) == [fault]


def test_an_unknown_key_in_a_workers_settings_lists_the_known_ones() -> None:
    (fault,) = worker_fault("settings: {block: 16}")
    place = "f.yaml:6: pools[0].workers[0].settings.block"
    assert fault.startswith(f"{place}: unknown key; known here: async_scheduling, block_size, ")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("pools: 5", "f.yaml:1: pools: expected a list"),
        ("pools:", "f.yaml:1: pools: expected a list"),
        ("pools:\n- name: p\n  workers: {}\n", "f.yaml:3: pools[0].workers: expected a list"),
        ("pools:\n- name: p\n  workers: [x]\n", "f.yaml:3: pools[0].workers[0]: expected keys and values"),
        *(
            (
                f'pools:\n- name: "a{control}"\n',
                "f.yaml:2: pools[0].name: expected a name without line breaks and other control characters",
            )
            for control in ("\\n", "\\r", "\\0", "\\x7f")
        ),
        ('pools:\n- name: "\\ud800"\n', r"f.yaml:2: pools[0].name: not a text: '\ud800'"),
        ('tokenization:\n  threads: "\\udfff"\n', r"f.yaml:2: tokenization.threads: not a text: '\udfff'"),
        ('listen:\n  grpc: "h:1\\n"\n', "f.yaml:2: listen.grpc: expected host:port"),
        ("pools:\n- name: ''\n", "f.yaml:2: pools[0].name: expected `str` of length >= 1 and <= 128"),
        (
            "tokenization: {deadline_s: .nan}",
            "f.yaml:1: tokenization.deadline_s: expected `float` > 0.0 and <= 31622400.0",
        ),
        ("tickets: {max_age_s: .inf}", "f.yaml:1: tickets.max_age_s: expected `float` > 0.0 and <= 31622400.0"),
        ("shutdown: {grace_s: -1}", "f.yaml:1: shutdown.grace_s: expected `float` >= 0.0 and <= 31622400.0"),
        ("probe: {interval_s: 1e300}", "f.yaml:1: probe.interval_s: expected `float`, got `str`"),
    ],
)
def test_values_that_cannot_be(text: str, fault: str) -> None:
    assert faults(text) == [fault]


@pytest.mark.parametrize("address", ["h:1", "10.0.0.1:65535", "engine-0.svc:8000", "[::1]:80", "[fe80::1.2.3.4]:80"])
def test_addresses(address: str) -> None:
    assert parse_config(f"listen: {{grpc: '{address}'}}", "f").listen.grpc == address


@pytest.mark.parametrize(
    "address",
    [
        "h",
        ":1",
        "h:",
        "h:x",
        "h:65536",
        "h:99999",
        "h:123456",
        "::1:80",
        "[::1]",
        "[x]:1",
        "http://h:1",
        "h:1/x",
        "h h:1",
    ],
)
def test_what_is_no_address(address: str) -> None:
    assert faults(f"listen: {{grpc: '{address}'}}") == ["f.yaml:1: listen.grpc: expected host:port"]


@pytest.mark.parametrize("address", ["tcp://*:5557", "h:5557", "udp://h:1", "tcp://", "5557"])
def test_what_is_no_zmq_address(address: str) -> None:
    assert worker_fault(f"kv_events: '{address}'") == [
        "f.yaml:6: pools[0].workers[0].kv_events: expected a ZMQ address to connect to, such as tcp://host:5557 (no *)"
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("pools: [{name: p}, {name: p, models: [q]}]", "pools[1].name: pool 'p' is already named at pools[0].name"),
        (
            "pools: [{name: p, models: [m]}, {name: q, models: [x, m]}]",
            "pools[1].models: model 'm' is already named at pools[0].models",
        ),
        (
            "pools: [{name: p}, {name: q, models: [p]}]",
            "pools[1].models: model 'p' is already named at pools[0].models",
        ),
        (
            "pools: [{name: p, workers: [{name: w, endpoint: h:1}]}, {name: q, workers: [{name: w, endpoint: h:2}]}]",
            "pools[1].workers[0].name: worker 'w' is already named at pools[0].workers[0].name",
        ),
    ],
)
def test_names_that_are_taken(text: str, fault: str) -> None:
    assert faults(text) == [f"f.yaml:1: {fault}"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("listen: {}\npools: []\nlisten: {}\n", "f.yaml:3: listen: given twice; the first is in line 1"),
        (
            "pools:\n- name: p\n  tokenizer: a\n  tokenizer: b\n",
            "f.yaml:4: pools[0].tokenizer: given twice; the first is in line 3",
        ),
        ("listen: {grpc: 'h:1', grpc: 'h:2'}", "f.yaml:1: listen.grpc: given twice; the first is in line 1"),
    ],
)
def test_a_key_that_is_given_twice_is_not_silently_the_last(text: str, fault: str) -> None:
    assert faults(text) == [fault]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [", 1),
        ("a:\n  b: 1\n c: 2\n", 3),
        ("\tx: 1", 1),
        ("a: *nothing", 1),
        ("a: 1\n---\nb: 2\n", 2),
        ("a: !!python/object:os.system x", 1),
        ("? [a]\n: b", 1),
        ('a: !!int ""', 1),
        ('a: !!float ""', 1),
        ("a: !!bool maybe", 1),
        ("a: !!timestamp never", 1),
        ("a: 2020-13-45", 1),
        ("\x00", 1),
        ("a: &x {<<: *x}", 1),
        ("[" * 5000, 1),
    ],
)
def test_what_is_not_yaml_is_a_fault_with_a_line(text: str, line: int) -> None:
    assert faults(text)[0].startswith(f"f.yaml:{line}: ")


def test_anchors_and_merges_are_followed() -> None:
    text = """\
pools:
  - name: p
    workers:
      - {name: a, endpoint: h:1, settings: &s {block_size: 32}}
      - {name: b, endpoint: h:2, settings: *s}
      - {name: c, endpoint: h:3, settings: {<<: *s, max_num_seqs: 8}}
"""
    a, b, c = parse_config(text, "f").pools[0].workers
    assert a.settings == b.settings == EngineSettings(block_size=32)
    assert c.settings == EngineSettings(block_size=32, max_num_seqs=8)


@pytest.mark.parametrize("text", ["&a [*a]", "pools: &a [*a]", "pools: [&a {name: *a}]", "listen: &a {grpc: *a}"])
def test_a_file_that_contains_itself_is_only_a_fault(text: str) -> None:
    assert faults(text)


def test_the_tokenizers_folder_is_taken_from_the_files_own(tmp_path: Path) -> None:
    path = tmp_path / "headway.yaml"
    path.write_text(GOOD)
    assert load_config(path).pools[0].tokenizer == str(tmp_path / "models" / "llama")
    assert load_config(path).pools[1].tokenizer is None


def test_a_file_that_cannot_be_read_is_a_fault_too(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.yaml", tmp_path, binary):
        with pytest.raises(BadConfig, match="cannot be read") as caught:
            load_config(path)
        assert caught.value.faults[0].startswith(f"{path}: ")


KEYS = st.sampled_from(
    ["listen", "grpc", "pools", "name", "models", "workers", "endpoint", "settings", "learning", "probe", "<<", "x"]
)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates() | st.binary(max_size=3)
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES | st.sampled_from(["h:1", "p", "tcp://h:1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | LEAVES, inner, max_size=4),
    max_leaves=12,
)


def parsed_or_bad(text: str) -> None:
    try:
        config = parse_config(text, "f")
    except BadConfig as bad:
        places = [fault.split(": ")[0] for fault in bad.faults]
    else:
        assert isinstance(config, Config)
        return
    assert places
    assert all(place.startswith("f:") and place[2:].isdigit() for place in places)


@settings(deadline=None, max_examples=400)
@given(st.dictionaries(KEYS, VALUES, max_size=4) | VALUES)
def test_any_tree_is_a_config_or_a_bad_one(tree: object) -> None:
    parsed_or_bad(yaml.safe_dump(tree))


@settings(deadline=None, max_examples=400)
@given(
    st.text(max_size=40)
    | st.lists(st.sampled_from([*"{}[]:,&*!?-|>%@'\"#\n a1", "<<", "!!int ", "pools: "])).map("".join)
)
def test_any_text_is_a_config_or_a_bad_one(text: str) -> None:
    parsed_or_bad(text)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, len(GOOD)), st.integers(0, 30), st.text("{}[]:-\n &*!a1", max_size=4))
def test_a_damaged_file_is_a_config_or_a_bad_one(at: int, lost: int, noise: str) -> None:
    parsed_or_bad(GOOD[:at] + noise + GOOD[at + lost :])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokenization: {deadline_s: 3}", "well below Envoy's message_timeout"),
        ("gateway: {max_message_timeout_s: 0.6}", "large bodies get no more time"),
        ("{}", "every request is passed on"),
        ("pools: [{name: p}]", "answered with 503"),
        ("pools: [{name: p, workers: [{name: w, endpoint: engine-a:80}]}]", "by address, not by name"),
        ("pools: [{name: p, workers: [{name: w, endpoint: 10.0.0.1:80}]}]", "without kv_events"),
        ("pools: [{name: p, workers: [{name: w, endpoint: 10.0.0.1:80, kv_events: tcp://h:1}]}]", "without kv_replay"),
    ],
)
def test_what_is_allowed_and_hardly_meant_is_noted(text: str, said: str) -> None:
    assert any(said in note for note in notes(parse_config(text, "f.yaml")))


WORKER = "pools: [{name: p, workers: [{name: w, endpoint: 10.0.0.1:80, "


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("listen: {grpc: 127.0.0.1:1, admin: 127.0.0.1:1}", "listen.admin", "the same port as listen.grpc"),
        ("listen: {grpc: 0.0.0.0:9, admin: 127.0.0.1:9}", "listen.admin", "the same port as listen.grpc"),
        (
            "pools: [{name: p, admission: {guard: {window: 5}}}]",
            "pools[0].admission.guard.window",
            "at least guard.least, which is 20",
        ),
        (WORKER + "kv_events: tcp://h:65534, data_parallel_ranks: 3}]}]", "pools[0].workers[0].kv_events", "65536"),
        (WORKER + "kv_replay: tcp://h:65535, data_parallel_ranks: 2}]}]", "pools[0].workers[0].kv_replay", "65536"),
    ],
)
def test_values_that_cannot_work_together_are_a_fault(text: str, key: str, said: str) -> None:
    with pytest.raises(BadConfig) as caught:
        parse_config(text, "f.yaml")
    (fault,) = caught.value.faults
    assert fault.startswith(f"f.yaml:1: {key}: ")
    assert said in fault


@pytest.mark.parametrize(
    "text",
    [
        "listen: {grpc: 127.0.0.1:0, admin: 127.0.0.1:0}",
        "listen: {grpc: 127.0.0.1:9, admin: 127.0.0.2:9}",
        "pools: [{name: p, admission: {guard: {window: 5, false_alarms: null}}}]",
        WORKER + "kv_events: tcp://h:65534, data_parallel_ranks: 2}]}]",
        WORKER + "kv_events: ipc:///run/engine, data_parallel_ranks: 1024}]}]",
    ],
)
def test_values_that_only_look_so_are_none(text: str) -> None:
    assert isinstance(parse_config(text, "f.yaml"), Config)


@pytest.mark.parametrize("key", ["window", "least"])
def test_a_count_beyond_every_machine_is_a_fault(key: str) -> None:
    with pytest.raises(BadConfig, match=rf"guard\.{key}: "):
        parse_config(f"pools: [{{name: p, admission: {{guard: {{{key}: {10**30}}}}}}}]", "f.yaml")


@pytest.mark.parametrize("port", [65536, 70000, 99999])
def test_a_zmq_port_that_there_is_not_is_a_fault(port: int) -> None:
    with pytest.raises(BadConfig, match=r"kv_events: .*tcp://host:5557"):
        parse_config(f"{WORKER}kv_events: 'tcp://h:{port}'}}]}}]", "f.yaml")


def workers_notes(*workers: str) -> list[str]:
    listed = "".join(f"  - {{{worker}}}\n" for worker in workers)
    return list(notes(parse_config(f"pools:\n- name: p\n  tokenizer: t\n  workers:\n{listed}", "f.yaml")))


def test_addresses_that_are_given_twice_are_noted() -> None:
    feed = "kv_events: tcp://h:5557, kv_replay: tcp://h:5558"
    assert workers_notes(f"name: v, endpoint: '10.0.0.1:80', {feed}", "name: w, endpoint: '10.0.0.1:80'") == [
        "pool 'p', worker 'w', endpoint: 10.0.0.1:80 is also that of pool 'p', worker 'v', endpoint",
        "pool 'p', worker 'w': without kv_events only engines that name them are followed",
    ]
    assert workers_notes(f"name: w, endpoint: '10.0.0.1:80', data_parallel_ranks: 2, {feed}") == [
        "pool 'p', worker 'w', kv_replay: tcp://h:5558 is also that of pool 'p', worker 'w', kv_events of rank 1"
    ]
    apart = "kv_events: tcp://h:5557, kv_replay: tcp://h:5657"
    assert workers_notes(f"name: w, endpoint: '10.0.0.1:80', data_parallel_ranks: 100, {apart}") == []


def test_admission_is_off_as_the_documentation_writes_it() -> None:
    for written in ("off", "Off", "'off'"):
        config = parse_config(f"pools: [{{name: p, admission: {{mode: {written}}}}}]", "f.yaml")
        assert config.pools[0].admission.mode == "off"


def test_an_address_in_brackets_is_one() -> None:
    text = "pools: [{name: p, tokenizer: t, workers: [{name: w, endpoint: '[::1]:80', kv_events: tcp://h:1, kv_replay: tcp://h:2}]}]"
    assert list(notes(parse_config(text, "f.yaml"))) == []


def test_a_zmq_address_needs_its_port() -> None:
    (fault,) = faults("pools: [{name: p, workers: [{name: w, endpoint: 10.0.0.1:80, kv_events: tcp://10.0.0.1}]}]")
    assert "expected a ZMQ address" in fault


def test_the_decisions_keys_say_what_they_say() -> None:
    text = """
gateway: {trust_request_start: true}
pools:
- name: p
  admission:
    mode: shadow
    max_queue_wait_s: 20
    max_ttft_s: 2.5
    overload_wait_s: null
    overload_kv_demand: 2
    risk: 0.05
    on_reject: fail
    guard: {false_alarms: null}
  routing: {prefer: cache, others: {cache: 8}, session_hint: 0}
  fairness: {enabled: true, wait_s: 1}
  workers:
  - {name: a, endpoint: "h:1", adapters: [sql, poems]}
  - {name: b, endpoint: "h:2", adapters: [sql]}
"""
    (pool,) = parse_config(text, "f.yaml").pools
    assert (pool.admission.mode, pool.admission.on_reject, pool.admission.risk) == ("shadow", "fail", 0.05)
    assert (pool.admission.max_queue_wait_s, pool.admission.max_ttft_s) == (20, 2.5)
    assert (pool.admission.overload_wait_s, pool.admission.overload_kv_demand) == (None, 2)
    assert pool.admission.guard.false_alarms is None
    assert (pool.routing.prefer, pool.routing.others.cache, pool.routing.others.balanced) == ("cache", 8, 1)
    assert (pool.fairness.enabled, pool.fairness.wait_s) == (True, 1)
    assert pool.adapter_names == {"sql", "poems"}


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ("admission: {mode: on}", "admission.mode: expected one of enforce, shadow, off"),
        ("admission: {mode: strict}", "admission.mode: expected one of enforce, shadow, off"),
        ("admission: {max_queue_wait_s: 4}", "admission.max_queue_wait_s: expected `float` >= 5.0 and <= 300.0"),
        ("admission: {risk: 1}", "admission.risk: expected `float` > 0.0 and < 1.0"),
        ("admission: {guard: {limit: 1}}", "admission.guard.limit: unknown key; known here: false_alarms, least, "),
        (
            "admission: {overload_kv_demand: 0.5}",
            "admission.overload_kv_demand: expected `float` >= 1.0 and <= 1000000.0",
        ),
        ("routing: {prefer: speed}", "routing.prefer: expected one of latency, balanced, cache"),
        ("routing: {others: {cash: 1}}", "routing.others.cash: unknown key; known here: balanced, cache, latency"),
        ("fairness: {wait_s: -1}", "fairness.wait_s: expected `float` >= 0.0 and <= 31622400.0"),
    ],
)
def test_a_fault_in_the_decisions_keys_is_named_with_its_place(keys: str, fault: str) -> None:
    (told,) = faults(f"pools:\n- name: p\n  {keys}\n")
    assert told.startswith(f"f.yaml:3: pools[0].{fault}")


def test_an_adapter_belongs_to_one_pool() -> None:
    text = "".join(
        f"- name: {name}\n  workers: [{{name: {name}0, endpoint: 'h:1', adapters: [sql]}}]\n" for name in ("p", "q")
    )
    assert faults(f"pools:\n{text}") == [
        "f.yaml:5: pools[1].workers[0].adapters: adapter 'sql' is already named in pools[0]"
    ]


_ODD = [-1, 0, math.nan, math.inf, -math.inf, 1e308, 10**30, "x", "", True, None, [], {}, {"zz": 1}, [None], [[[]]]]


def _keys(kind: type[msgspec.Struct], path: str = "") -> list[str]:
    """Every key of the config file, as a path of keys; `[]` stands for a list's only item."""
    found = []
    for field in msgspec.structs.fields(kind):
        here = f"{path}{field.name}"
        found.append(here)
        for inner in get_args(field.type) or (field.type,):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                found += _keys(inner, f"{here}[]." if get_origin(field.type) is list else f"{here}.")
    return found


@pytest.mark.parametrize("path", _keys(Config))
def test_an_odd_value_of_any_key_is_taken_or_named_and_never_endless(path: str) -> None:
    for odd in _ODD:
        value: object = odd
        for part in reversed(path.split(".")):
            named = (
                {"name": "n", "endpoint": "h:1"} if part == "workers[]" else {"name": "n"} if part == "pools[]" else {}
            )
            inner = {**named, **value} if isinstance(value, dict) else value
            value = {part.removesuffix("[]"): [inner] if part.endswith("[]") else inner}
        text = yaml.safe_dump(value)
        told = _told(text)
        assert not told or path.rpartition(".")[2] in told, text
        assert told or not isinstance(odd, float) or math.isfinite(odd), text


def _told(text: str) -> str:
    try:
        parse_config(text, "f.yaml")
    except BadConfig as error:
        return str(error)
    return ""


WITH_SETTINGS = """pools:
- name: p
  workers:
  - {name: w, endpoint: 'h:1', cache: {rule: %s}, settings: {%s}}
"""


def settings_notes(rule: str, setting: str) -> list[str]:
    """What is noted of one of a worker's settings."""
    where = f"pool 'p', worker 'w', settings.{setting.partition(':')[0]}: "
    noted = notes(parse_config(WITH_SETTINGS % (rule, setting), "f"))
    return [note.removeprefix(where) for note in noted if note.startswith(where)]


VLLMS_OWN = ["long_prefill_token_threshold: 5", "long_prefill_token_threshold_adaptive: true", "draft_slots: 1"]
SGLANGS_OWN = [
    "enable_mixed_chunk: true",
    "prefill_decode_interval: 2",
    "prefill_decode_interval_min_bs: 2",
    "schedule_conservativeness: 0.3",
    "max_prefill_tokens: 9000",
    "schedule_low_priority_values_first: true",
    "default_priority_value: 3",
    "priority_scheduling_preemption_threshold: 3",
    "disable_priority_preemption: true",
]
EVERYBODYS = [
    "block_size: 32",
    "num_gpu_blocks: 7",
    "max_num_batched_tokens: 7",
    "max_num_seqs: 7",
    "max_model_len: 7",
    "async_scheduling: false",
    "enable_chunked_prefill: false",
]
SOMEBODYS = ["scheduling_policy: priority", "device: cpu"]
ONLY = {"sglang": "only SGLang has it", "vllm": "only vLLM has it, or is followed with it"}


def test_every_setting_is_looked_at_here() -> None:
    looked_at = [setting.partition(":")[0] for setting in VLLMS_OWN + SGLANGS_OWN + EVERYBODYS + SOMEBODYS]
    assert sorted(looked_at) == sorted(EngineSettings.__struct_fields__)


@pytest.mark.parametrize(
    ("rule", "setting", "whose"),
    [
        *(("vllm", setting, "sglang") for setting in SGLANGS_OWN),
        *(("sglang", setting, "vllm") for setting in VLLMS_OWN),
        *(("tensorrt_llm", setting, "sglang") for setting in SGLANGS_OWN),
        *(("tensorrt_llm", setting, "vllm") for setting in VLLMS_OWN + SOMEBODYS),
    ],
)
def test_what_an_engine_does_not_have_is_noted_and_has_no_effect(rule: Rule, setting: str, whose: str) -> None:
    assert settings_notes(rule, setting) == [f"no effect with cache.rule {rule}: {ONLY[whose]}"]
    worker = parse_config(WITH_SETTINGS % (rule, setting), "f").pools[0].workers[0]
    assert worker.settings.for_engine(rule) == EngineSettings().for_engine(rule)


@pytest.mark.parametrize(
    ("rule", "setting"),
    [
        *(("vllm", setting) for setting in VLLMS_OWN + EVERYBODYS + SOMEBODYS),
        *(("sglang", setting) for setting in SGLANGS_OWN + EVERYBODYS + SOMEBODYS),
        *(("tensorrt_llm", setting) for setting in EVERYBODYS if "chunked" not in setting),
        ("tensorrt_llm", "enable_chunked_prefill: true"),
    ],
)
def test_what_an_engine_has_takes_effect(rule: Rule, setting: str) -> None:
    worker = parse_config(WITH_SETTINGS % (rule, setting), "f").pools[0].workers[0]
    assert worker.settings.for_engine(rule) != EngineSettings().for_engine(rule)


@pytest.mark.parametrize("rule", ["vllm", "sglang", "tensorrt_llm"])
def test_a_default_that_is_written_down_is_not_noted(rule: str) -> None:
    defaults = {name: value for name, value in msgspec.structs.asdict(EngineSettings()).items() if value is not None}
    noted = notes(parse_config(WITH_SETTINGS % (rule, yaml.safe_dump(defaults, default_flow_style=True)[1:-2]), "f"))
    assert not [note for note in noted if "no effect" in note]


@pytest.mark.parametrize(
    ("rule", "given", "why"),
    [
        *(
            ("sglang", setting, "unless scheduling_policy is priority")
            for setting in (
                "schedule_low_priority_values_first: true",
                "default_priority_value: 3",
                "priority_scheduling_preemption_threshold: 3",
                "disable_priority_preemption: true",
            )
        ),
        ("sglang", "prefill_decode_interval_min_bs: 2", "without prefill_decode_interval"),
        ("vllm", "long_prefill_token_threshold_adaptive: true", "without long_prefill_token_threshold"),
        (
            "sglang",
            "priority_scheduling_preemption_threshold: 3, scheduling_policy: priority, "
            "disable_priority_preemption: true",
            "with disable_priority_preemption",
        ),
        ("sglang", "priority_scheduling_preemption_threshold: 3, scheduling_policy: priority", None),
        ("sglang", "prefill_decode_interval_min_bs: 2, prefill_decode_interval: 3", None),
        ("vllm", "long_prefill_token_threshold_adaptive: true, long_prefill_token_threshold: 64", None),
    ],
)
def test_a_setting_that_needs_another_one_is_noted_without_it(rule: str, given: str, why: str | None) -> None:
    assert settings_notes(rule, given) == ([] if why is None else [f"no effect {why}"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokenization: {large_bytes: 5}", "tokenization.large_bytes: no effect without gateway.max_message_timeout_s"),
        ("recording: {tokens: true}", "recording.tokens: no effect without recording.folder"),
        ("recording: {compress: false}", "recording.compress: no effect without recording.folder"),
        ("recording: {max_mb: 5}", "recording.max_mb: no effect without recording.folder"),
        ("learned: {every_s: 5}", "learned.every_s: no effect without learned.folder"),
        ("pools: [{name: p, fairness: {wait_s: 5}}]", "pool 'p', fairness.wait_s: no effect without fairness.enabled"),
        (
            "pools: [{name: p, admission: {hold_mb: 5}}]",
            "pool 'p', admission.hold_mb: no effect without admission.hold_s",
        ),
        (
            "pools: [{name: p, admission: {guard: {false_alarms: null, window: 60}}}]",
            "pool 'p', admission.guard.window: no effect while false_alarms is null",
        ),
        (
            "pools: [{name: p, workers: [{name: w, endpoint: 'h:1', kv_replay: 'tcp://h:2'}]}]",
            "pool 'p', worker 'w', kv_replay: no effect without kv_events",
        ),
        (
            WITH_SETTINGS % ("sglang, speculative: true", ""),
            "pool 'p', worker 'w', cache.speculative: no effect with cache.rule sglang",
        ),
        (
            WITH_SETTINGS % ("sglang, cache_hit_alignment: 16", ""),
            "pool 'p', worker 'w', cache.cache_hit_alignment: no effect with cache.rule sglang",
        ),
    ],
)
def test_a_key_that_needs_another_one_is_noted_without_it(text: str, said: str) -> None:
    (noted,) = [note for note in notes(parse_config(text, "f")) if "no effect" in note]
    assert noted.startswith(said)


def test_keys_that_have_what_they_need_are_not_noted() -> None:
    text = """
gateway: {max_message_timeout_s: 5}
tokenization: {large_bytes: 5}
recording: {folder: r, tokens: true, max_mb: 5}
learned: {folder: l, every_s: 5}
pools:
- name: p
  admission: {hold_s: 0.1, hold_mb: 5, guard: {window: 60}}
  fairness: {enabled: true, wait_s: 5}
  workers:
  - {name: w, endpoint: 'h:1', kv_events: 'tcp://h:1', kv_replay: 'tcp://h:2', cache: {speculative: true}}
"""
    assert not [note for note in notes(parse_config(text, "f")) if "no effect" in note]


@pytest.mark.parametrize(
    ("rule", "given", "probed", "key"),
    [
        ("tensorrt_llm", "", True, "num_gpu_blocks"),
        ("tensorrt_llm", "", False, "num_gpu_blocks"),
        ("tensorrt_llm", "num_gpu_blocks: 5", True, "max_model_len"),
        ("tensorrt_llm", "num_gpu_blocks: 5, max_model_len: 5", True, None),
        ("vllm", "", False, "num_gpu_blocks"),
        ("vllm", "num_gpu_blocks: 5", False, None),
        ("vllm", "", True, None),
        ("sglang", "", True, None),
    ],
)
def test_it_is_noted_where_nobody_tells_how_much_a_cache_holds(
    rule: str, given: str, probed: bool, key: str | None
) -> None:
    text = WITH_SETTINGS % (rule, given) + f"probe: {{interval_s: {5 if probed else 0}}}\n"
    said = [note for note in notes(parse_config(text, "f")) if "not given" in note]
    assert [note.partition(": ")[0] for note in said] == (
        [] if key is None else [f"pool 'p', worker 'w', settings.{key}"]
    )
    assert all("find space at once" in note if key == "num_gpu_blocks" else "too short" in note for note in said)


TENSORRT_LLM = WITH_SETTINGS.replace("%s", "tensorrt_llm", 1)


def test_a_drafter_that_takes_whole_steps_is_a_fault_whether_their_size_is_given_or_assumed() -> None:
    text = "pools:\n- name: p\n  workers:\n  - {name: w, endpoint: 'h:1', settings: {%s}}\n"
    where = "f.yaml:4: pools[0].workers[0].settings.draft_slots: must be less than max_num_batched_tokens"
    (found,) = faults(text % "draft_slots: 200, max_num_batched_tokens: 200")
    assert found.startswith(f"{where}, 200:")
    assert parse_config(text % "draft_slots: 199, max_num_batched_tokens: 200", "f").pools[0].workers


def test_of_tensorrt_llm_the_defaults_are_its_own() -> None:
    worker = parse_config(TENSORRT_LLM % "", "f").pools[0].workers[0]
    told = worker.settings.for_engine(worker.cache.rule)
    assert (told.family, told.max_num_batched_tokens, told.max_num_seqs) == ("tensorrt_llm", 8192, 2048)
    assert (told.enable_chunked_prefill, told.async_scheduling) == (False, True)
    given = "max_num_seqs: 7, max_num_batched_tokens: 99, enable_chunked_prefill: true"
    told = parse_config(TENSORRT_LLM % given, "f").pools[0].workers[0].settings.for_engine("tensorrt_llm")
    assert (told.max_num_batched_tokens, told.max_num_seqs, told.enable_chunked_prefill) == (99, 7, True)


SEVERAL_ROUNDS = """\
surprise: 1
listen: {grpc: '127.0.0.1:9', admin: '127.0.0.1:9'}
tickets: 7
pools:
- name: p
  admission: {hold_s: 3, guard: {window: 5}}
  name: q
  workers:
  - {name: "\\ud800", endpoint: h, kv_events: 'tcp://h:65535', data_parallel_ranks: 2, settings: {draft_slots: 200,
     max_num_batched_tokens: 100}}
"""


def test_values_that_cannot_work_together_are_told_with_all_other_faults_in_the_order_of_the_file() -> None:
    assert [fault.split(": ")[:2] for fault in faults(SEVERAL_ROUNDS)] == [
        ["f.yaml:1", "surprise"],
        ["f.yaml:2", "listen.admin"],
        ["f.yaml:3", "tickets"],
        ["f.yaml:6", "pools[0].admission.guard.window"],
        ["f.yaml:6", "pools[0].admission.hold_s"],
        ["f.yaml:7", "pools[0].name"],
        ["f.yaml:9", "pools[0].workers[0].name"],
        ["f.yaml:9", "pools[0].workers[0].endpoint"],
        ["f.yaml:9", "pools[0].workers[0].settings.draft_slots"],
        ["f.yaml:9", "pools[0].workers[0].kv_events"],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "listen: {grpc: '127.0.0.1:9464', admin: 5}",
        "pools: [{name: p, admission: {guard: {window: 5, least: x}}}]",
        "pools: [{name: p, admission: {guard: {window: 5, leest: 3}}}]",
        "pools: [{name: p, admission: {hold_s: 2}}]\ngateway: {max_mesage_timeout_s: 5}",
        "pools: [{name: p, admission: {hold_s: 2}}]\ngateway: 5",
        "pools: [{name: p, admission: {hold_s: 2}}]\ngateway: {max_message_timeout_s: 0, max_message_timeout_s: 5}",
        WORKER + "settings: {draft_slots: 200, device: gqu, max_num_batched_tokens: 200}}]}]",
        WORKER + "settings: {draft_slots: 200, max_num_batched_tokens: 200}, cache: {rule: trt}}]}]",
    ],
)
def test_what_a_fault_has_left_of_a_value_is_not_held_against_another(text: str) -> None:
    assert len(faults(text)) == 1


@pytest.mark.parametrize(("granted_s", "hold_s", "longest"), [(0, 0.41, "0.4"), (5, 2.6, "2.5"), (0.5, 0.5, "0.4")])
def test_a_hold_that_envoy_would_not_wait_for_is_a_fault(granted_s: float, hold_s: float, longest: str) -> None:
    text = "gateway: {max_message_timeout_s: %g}\npools:\n- name: p\n  admission: {hold_s: %g}\n"
    with pytest.raises(BadConfig) as bad:
        parse_config(text % (granted_s, hold_s), "f.yaml")
    (fault,) = bad.value.faults
    assert fault.startswith(
        f"f.yaml:4: pools[0].admission.hold_s: at most {longest}: it must stay below Envoy's message_timeout"
    )
    assert "gateway.max_message_timeout_s" in fault
    parse_config(text % (granted_s, float(longest)), "f.yaml")
