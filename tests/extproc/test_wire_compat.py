"""Our protos say what Envoy's say: by descriptor (xds-protos), by bytes (envoy-data-plane), and in one process."""

import importlib
import importlib.util
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from extproc import wire
from extproc.exchange import (
    BodyMode,
    Continue,
    Phase,
    Protocol,
    Refuse,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from extproc.pb import access_log_pb2, base_pb2, ext_proc_pb2

ROOT = Path(__file__).resolve().parents[2]
OUR_FILES: tuple[FileDescriptor, ...] = (base_pb2.DESCRIPTOR, ext_proc_pb2.DESCRIPTOR, access_log_pb2.DESCRIPTOR)
ROOTS = {
    "headway.wire.ext_proc.v3.ProcessingRequest": "envoy.service.ext_proc.v3.ProcessingRequest",
    "headway.wire.ext_proc.v3.ProcessingResponse": "envoy.service.ext_proc.v3.ProcessingResponse",
    "headway.wire.access_log.v3.StreamAccessLogsMessage": "envoy.service.accesslog.v3.StreamAccessLogsMessage",
    "headway.wire.access_log.v3.StreamAccessLogsResponse": "envoy.service.accesslog.v3.StreamAccessLogsResponse",
}


# Descriptors.


def test_every_field_we_declare_is_envoys_field(envoy_pool: descriptor_pool.DescriptorPool) -> None:
    assert differences(descriptor_pool.Default(), envoy_pool)[0] == []


def test_no_message_and_no_enum_of_ours_escapes_the_comparison(envoy_pool: descriptor_pool.DescriptorPool) -> None:
    assert declared() == {name for name in differences(descriptor_pool.Default(), envoy_pool)[1] if "headway" in name}


def rename(field: FieldDescriptorProto) -> None:
    field.name = "renamed"


def renumber(field: FieldDescriptorProto) -> None:
    field.number = 1000


def retype(field: FieldDescriptorProto) -> None:
    field.ClearField("type_name")
    integer = field.type == FieldDescriptorProto.TYPE_INT64
    field.type = FieldDescriptorProto.TYPE_FIXED64 if integer else FieldDescriptorProto.TYPE_INT64


def relabel(field: FieldDescriptorProto) -> None:
    repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    field.label = FieldDescriptorProto.LABEL_OPTIONAL if repeated else FieldDescriptorProto.LABEL_REPEATED


@pytest.mark.parametrize("change", [rename, renumber, retype, relabel])
def test_a_wrong_field_anywhere_is_found(
    change: Callable[[FieldDescriptorProto], None], envoy_pool: descriptor_pool.DescriptorPool
) -> None:
    for path in field_paths():
        if change is relabel and field_at(our_file_protos(), path).HasField("oneof_index"):
            continue  # protobuf itself refuses a repeated member of a oneof
        mutant = pool_with(lambda files, path=path: change(field_at(files, path)))  # type: ignore[misc]
        assert differences(mutant, envoy_pool)[0], f"{change.__name__} of {path} went unnoticed"


def test_an_added_field_is_found(envoy_pool: descriptor_pool.DescriptorPool) -> None:
    def add(files: list[FileDescriptorProto]) -> None:
        message(files, "ImmediateResponse").field.add(
            name="extra", number=6, type=FieldDescriptorProto.TYPE_BOOL, label=FieldDescriptorProto.LABEL_OPTIONAL
        )

    assert differences(pool_with(add), envoy_pool)[0] == [
        "headway.wire.ext_proc.v3.ImmediateResponse.extra: not Envoy's"
    ]


def test_a_field_outside_its_oneof_is_found(envoy_pool: descriptor_pool.DescriptorPool) -> None:
    def free(files: list[FileDescriptorProto]) -> None:
        field_at(files, "BodyMutation.clear_body").ClearField("oneof_index")

    assert differences(pool_with(free), envoy_pool)[0]


def test_a_wrong_enum_value_is_found(envoy_pool: descriptor_pool.DescriptorPool) -> None:
    def swap(files: list[FileDescriptorProto]) -> None:
        message(files, "ProcessingMode").enum_type[1].value[1].number = 9

    assert differences(pool_with(swap), envoy_pool)[0]


def test_services_and_methods_bear_envoys_names(envoy_pool: descriptor_pool.DescriptorPool) -> None:
    for service, method, messages in (
        (wire.PROCESSOR_SERVICE, wire.PROCESS_METHOD, ("ProcessingRequest", "ProcessingResponse")),
        (
            wire.ACCESS_LOG_SERVICE,
            wire.ACCESS_LOG_METHOD,
            ("StreamAccessLogsMessage", "StreamAccessLogsResponse"),
        ),
    ):
        found = envoy_pool.FindServiceByName(service).methods_by_name[method]
        assert (found.input_type.name, found.output_type.name) == messages
        assert {found.input_type.full_name, found.output_type.full_name} <= set(ROOTS.values())


# Bytes: Envoy's side is played by envoy-data-plane, which shares no code with protobuf's own runtime.

REPLIES: list[Reply] = [
    *(Continue(phase) for phase in Phase),
    *(
        Continue(phase, (("x-gateway-destination-endpoint", "10.0.0.1:8000"), ("x-empty", "")), ("x-drop",), {}, True)
        for phase in Phase
    ),
    Continue(
        Phase.REQUEST_BODY,
        dynamic_metadata={
            "envoy.lb": {"x-gateway-destination-endpoint": "10.0.0.1:8000,10.0.0.2:8000"},
            "headway": {"id": "abc", "ttft_s": 0.25, "learned": True, "shadow": False},
        },
    ),
    Refuse(429, (("retry-after", "3"),), b'{"error":{}}', "headway_queue_full", {"headway": {"id": "abc"}}),
    Refuse(503, (), b"", ""),
]


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: f"{type(reply).__name__}")
def test_envoy_understands_every_reply(reply: Reply, envoy_ext_proc: ModuleType) -> None:
    ours = wire.write(reply)
    theirs = envoy_ext_proc.ProcessingResponse.parse(wire.serialize_response(ours))
    assert_same(ours, theirs)


def test_a_routed_decision_arrives_field_by_field(envoy_ext_proc: ModuleType) -> None:
    reply = Continue(Phase.REQUEST_BODY, (("x-a", "1"),), ("x-b",), {"envoy.lb": {"k": "v"}}, True)
    theirs = envoy_ext_proc.ProcessingResponse.parse(wire.serialize_response(wire.write(reply)))
    changes = theirs.request_body.response
    (option,) = changes.header_mutation.set_headers
    assert (option.header.key, option.header.raw_value) == ("x-a", b"1")
    assert option.append_action.name == "OVERWRITE_IF_EXISTS_OR_ADD"
    assert changes.header_mutation.remove_headers == ["x-b"]
    assert changes.clear_route_cache
    assert changes.status.name == "CONTINUE"
    assert theirs.dynamic_metadata.fields["envoy.lb"].struct_value.fields["k"].string_value == "v"


def test_a_refusal_arrives_field_by_field(envoy_ext_proc: ModuleType) -> None:
    reply = Refuse(429, (("retry-after", "3"),), b"no", "full")
    theirs = envoy_ext_proc.ProcessingResponse.parse(wire.serialize_response(wire.write(reply))).immediate_response
    assert theirs.status.code.name == "TooManyRequests"
    assert theirs.headers.set_headers[0].header.raw_value == b"3"
    assert (theirs.body, theirs.details) == (b"no", "full")


def test_answers_for_full_duplex_arrive(envoy_ext_proc: ModuleType) -> None:
    ours = ext_proc_pb2.ProcessingResponse()
    ours.request_body.response.status = ext_proc_pb2.CommonResponse.CONTINUE_AND_REPLACE
    piece = ours.request_body.response.body_mutation.streamed_response
    piece.body, piece.end_of_stream = b"piece", True
    ours.mode_override.request_body_mode = ext_proc_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
    ours.mode_override.response_trailer_mode = ext_proc_pb2.ProcessingMode.SKIP
    ours.override_message_timeout.FromMilliseconds(1500)
    assert_same(ours, envoy_ext_proc.ProcessingResponse.parse(ours.SerializeToString()))


def test_events_that_envoy_encodes_are_read(envoy_ext_proc: ModuleType, envoy_core: ModuleType) -> None:
    def read(**fields: object) -> object:
        return wire.read(wire.parse_request(bytes(envoy_ext_proc.ProcessingRequest(**fields))))

    def headers(*pairs: tuple[str, bytes]) -> object:
        values = [envoy_core.HeaderValue(key=name, raw_value=raw) for name, raw in pairs]
        return envoy_ext_proc.HttpHeaders(headers=envoy_core.HeaderMap(headers=values), end_of_stream=True)

    modes = type(envoy_ext_proc.ProtocolConfiguration().request_body_mode)
    protocol = envoy_ext_proc.ProtocolConfiguration(request_body_mode=modes.BUFFERED, response_body_mode=modes.STREAMED)
    begun = read(request_headers=headers(("a", b"1"), ("b", b"\xff")), protocol_config=protocol)
    assert isinstance(begun, RequestHeaders)
    assert list(begun.headers) == [("a", "1"), ("b", "\udcff")]
    assert begun.end_of_stream
    assert begun.protocol == Protocol(BodyMode.BUFFERED, BodyMode.STREAMED)
    answered = read(response_headers=headers((":status", b"200")))
    assert isinstance(answered, ResponseHeaders)
    assert answered.status == 200
    body = envoy_ext_proc.HttpBody(body=b"x", end_of_stream=True)
    assert read(request_body=body) == RequestBody(b"x", True)
    assert read(response_body=body) == ResponseBody(b"x", True, None, None)
    trailers = envoy_ext_proc.HttpTrailers(trailers=envoy_core.HeaderMap())
    assert read(request_trailers=trailers) == RequestTrailers()
    assert read(response_trailers=trailers) == ResponseTrailers()


def test_attributes_and_metadata_that_envoy_encodes_are_read(
    envoy_ext_proc: ModuleType, envoy_core: ModuleType
) -> None:
    ours = ext_proc_pb2.ProcessingRequest()
    ours.response_body.body = b"x"
    ours.attributes["envoy.filters.http.ext_proc"].update({"response.code": 200})
    ours.metadata_context.filter_metadata["envoy.lb"].update({wire.SERVED_ENDPOINT_KEY: "10.0.0.1:8000"})
    theirs = envoy_ext_proc.ProcessingRequest.parse(ours.SerializeToString())
    assert theirs.attributes["envoy.filters.http.ext_proc"].fields["response.code"].number_value == 200
    assert isinstance(theirs.metadata_context, envoy_core.Metadata)
    assert wire.read(wire.parse_request(bytes(theirs))) == ResponseBody(b"x", False, 200, "10.0.0.1:8000")


def test_an_access_log_entry_that_envoy_encodes_is_read(envoy_access_log: ModuleType) -> None:
    data = envoy_plane("data.accesslog.v3")
    common = data.AccessLogCommon(
        response_flags=data.ResponseFlags(downstream_connection_termination=True),
        upstream_request_attempt_count=2,
        access_log_type=data.AccessLogType.DownstreamEnd,
        stream_id="ignored",
    )
    entry = data.HttpAccessLogEntry(
        common_properties=common,
        request=data.HttpRequestProperties(path="/v1/models", request_id="9b0d"),
        response=data.HttpResponseProperties(response_code=429, response_code_details="headway_queue_full"),
    )
    logs = envoy_access_log.StreamAccessLogsMessageHttpAccessLogEntries(log_entry=[entry])
    raw = bytes(envoy_access_log.StreamAccessLogsMessage(http_logs=logs))
    (end,) = wire.read_access_log(wire.parse_access_log(raw), ())
    assert (end.status, end.details, end.attempts, end.final) == (429, "headway_queue_full", 2, True)
    assert end.flags == {"downstream_connection_termination"}


# Generated code.


def test_the_generated_code_is_what_the_sources_yield(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_pb().main(["--check"]) == 0, capsys.readouterr().err


def test_generating_needs_neither_path_nor_the_checkout_as_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert generate_pb().main(["--check"]) == 0


def test_the_check_names_every_stale_file_and_its_remedy_and_generating_mends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = generate_pb()
    folder = tmp_path / "extproc" / "pb"
    shutil.copytree(ROOT / "extproc" / "pb", folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (folder / "base_pb2.py").write_text("# edited by hand\n")
    (folder / "ext_proc_pb2.pyi").unlink()
    (folder / "orphan_pb2.py").write_text("# its source is gone\n")
    assert script.main(["--check"]) == 1
    complaints = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in complaints] == [
        "extproc/pb/base_pb2.py",
        "extproc/pb/ext_proc_pb2.pyi",
        "extproc/pb/orphan_pb2.py",
    ]
    assert all(line.endswith("Run: make proto") for line in complaints)
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0
    assert not (folder / "orphan_pb2.py").exists()
    assert (folder / "__init__.py").exists()


def test_a_broken_source_is_reported_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = generate_pb()
    (tmp_path / "extproc" / "pb").mkdir(parents=True)
    (tmp_path / "extproc" / "pb" / "bad.proto").write_text('syntax = "proto3"; message {')
    monkeypatch.setattr(script, "PROTO", tmp_path)
    assert script.main(["--check"]) == 2
    assert "bad.proto" in capsys.readouterr().err


@pytest.mark.parametrize("first_ours", [True, False])
def test_ours_and_xds_protos_live_in_one_process(first_ours: bool) -> None:
    imports = ["import extproc.wire", "import envoy.service.ext_proc.v3.external_processor_pb2"]
    code = "; ".join(imports if first_ours else reversed(imports))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Helpers.


@pytest.fixture(scope="session")
def envoy_pool() -> descriptor_pool.DescriptorPool:
    """The pool that xds-protos registers Envoy's own descriptors in."""
    importlib.import_module("envoy.service.ext_proc.v3.external_processor_pb2")
    importlib.import_module("envoy.service.accesslog.v3.als_pb2")
    return descriptor_pool.Default()


@pytest.fixture(scope="session")
def envoy_ext_proc() -> ModuleType:
    return envoy_plane("service.ext_proc.v3")


@pytest.fixture(scope="session")
def envoy_access_log() -> ModuleType:
    return envoy_plane("service.accesslog.v3")


@pytest.fixture(scope="session")
def envoy_core() -> ModuleType:
    return envoy_plane("config.core.v3")


def envoy_plane(name: str) -> ModuleType:
    with warnings.catch_warnings():
        # Its pydantic validators are of a deprecated form.
        warnings.simplefilter("ignore")
        return importlib.import_module(f"envoy_data_plane.envoy.{name}")


def assert_same(ours: Message, theirs: Any) -> None:
    """Both hold the same values, both ways, and neither met a field that it does not know."""
    assert ParseDict(theirs.to_dict(), type(ours)()) == ours
    assert type(ours).FromString(bytes(theirs)) == ours


def generate_pb() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_pb", ROOT / "scripts" / "generate_pb.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def declared() -> set[str]:
    """Full names of every message and enum in our files, nested ones too."""
    names: set[str] = set()

    def visit(kind: Descriptor) -> None:
        names.add(kind.full_name)
        names.update(enum.full_name for enum in kind.enum_types)
        for nested in kind.nested_types:
            visit(nested)

    for file in OUR_FILES:
        names.update(enum.full_name for enum in file.enum_types_by_name.values())
        for kind in file.message_types_by_name.values():
            visit(kind)
    return names


def differences(
    our_pool: descriptor_pool.DescriptorPool, envoy_pool: descriptor_pool.DescriptorPool
) -> tuple[list[str], set[str]]:
    """What differs between our messages and Envoy's, from the roots down; and the names of ours that were compared."""
    found: list[str] = []
    seen: set[str] = set()

    def compare(ours: Descriptor, theirs: Descriptor) -> None:
        if ours.full_name in seen:
            return
        seen.add(ours.full_name)
        if ours.name != theirs.name:
            found.append(f"{ours.full_name}: Envoy calls it {theirs.full_name}")
        if not ours.full_name.startswith("headway."):
            if ours.full_name != theirs.full_name:
                found.append(f"{ours.full_name}: Envoy has {theirs.full_name}")
            return
        for field in ours.fields:
            if field.name in theirs.fields_by_name:
                compare_fields(field, theirs.fields_by_name[field.name])
            else:
                found.append(f"{field.full_name}: not Envoy's")

    def compare_fields(ours: FieldDescriptor, theirs: FieldDescriptor) -> None:
        if shape(ours) != shape(theirs):
            found.append(f"{ours.full_name}: {shape(ours)}, Envoy has {shape(theirs)}")
        elif ours.message_type is not None and theirs.message_type is not None:
            compare(ours.message_type, theirs.message_type)
        elif ours.enum_type is not None and theirs.enum_type is not None:
            compare_enums(ours.enum_type, theirs.enum_type)

    def compare_enums(ours: EnumDescriptor, theirs: EnumDescriptor) -> None:
        seen.add(ours.full_name)
        if ours.name != theirs.name:
            found.append(f"{ours.full_name}: Envoy calls it {theirs.full_name}")
        known = {value.name: value.number for value in theirs.values}
        found.extend(
            f"{ours.full_name}.{value.name}: {value.number}, Envoy has {known.get(value.name)}"
            for value in ours.values
            if known.get(value.name) != value.number
        )

    for our_name, their_name in ROOTS.items():
        compare(our_pool.FindMessageTypeByName(our_name), envoy_pool.FindMessageTypeByName(their_name))
    return found, seen


def shape(field: FieldDescriptor) -> tuple[int, int, bool, bool, str | None]:
    """Number, type, repeated, presence, oneof."""
    oneof = field.containing_oneof
    return field.number, field.type, field.is_repeated, field.has_presence, None if oneof is None else oneof.name


def pool_with(change: Callable[[list[FileDescriptorProto]], None]) -> descriptor_pool.DescriptorPool:
    """A pool of its own with our files after `change`."""
    files = our_file_protos()
    change(files)
    pool = descriptor_pool.DescriptorPool()
    for module in (struct_pb2, duration_pb2, timestamp_pb2, wrappers_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    for file in files:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


def our_file_protos() -> list[FileDescriptorProto]:
    files = []
    for file in OUR_FILES:
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        files.append(proto)
    return files


def field_paths() -> list[str]:
    """Message.field of every field in our files, but those of map entries, whose form protobuf itself enforces."""
    paths: list[str] = []

    def visit(kind: DescriptorProto, name: str) -> None:
        paths.extend(f"{name}.{field.name}" for field in kind.field)
        for nested in kind.nested_type:
            if not nested.options.map_entry:
                visit(nested, f"{name}.{nested.name}")

    for file in our_file_protos():
        for kind in file.message_type:
            visit(kind, kind.name)
    return paths


def message(files: list[FileDescriptorProto], path: str) -> DescriptorProto:
    """The message at `path`, such as "ResponseFlags.Unauthorized"."""
    first, *rest = path.split(".")
    found = next(kind for file in files for kind in file.message_type if kind.name == first)
    for name in rest:
        found = next(nested for nested in found.nested_type if nested.name == name)
    return found


def field_at(files: list[FileDescriptorProto], path: str) -> FieldDescriptorProto:
    owner, name = path.rsplit(".", 1)
    return next(field for field in message(files, owner).field if field.name == name)
