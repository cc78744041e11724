"""`headway report`: a filter's own grades, as a table."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from extproc.cli import EXIT_FAILED, EXIT_OK, main
from extproc.metrics import Metrics
from extproc.report import NoReport, report
from predictor.grading import CacheVerdict, Grade


def page(*errors_s: float, pool: str = "m") -> str:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for number, error_s in enumerate(errors_s):
        worker = "ab"[number % 2]
        metrics.grade(pool, worker, "curve", Grade(30.0, 30.0 + error_s, None, within_interval=abs(error_s) < 5))
        metrics.cache_verdict(pool, worker, CacheVerdict.RIGHT if number else CacheVerdict.OVER)
        metrics.cache_verdict(pool, worker, CacheVerdict.UNREPORTED)
    return generate_latest(registry).decode()


def cells(line: str) -> list[str]:
    return line.split()


def test_each_worker_and_its_pool_have_a_row() -> None:
    _, pool, first, second = report(page(0.0, 0.5, -2.0, 20.0)).splitlines()
    assert cells(pool) == ["m", "4", "50.0%", "75.0%", "75.0%", "75.0%"]
    assert cells(first) == ["a", "2", "50.0%", "100.0%", "100.0%", "50.0%"]
    assert cells(second) == ["b", "2", "50.0%", "50.0%", "50.0%", "100.0%"]


def test_a_filter_that_has_graded_nothing_says_so() -> None:
    assert report(page()).splitlines()[1:] == ["nothing has been graded yet"]


@pytest.mark.parametrize("text", ["", "up 1\n", "<html>not found</html>", "headway_predictions_graded_total{x 1"])
def test_what_is_no_page_of_a_filter_is_said(text: str) -> None:
    with pytest.raises(NoReport, match="no page of"):
        report(text)


@pytest.fixture
def admin() -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(page(0.1).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_command_asks_the_admin_port(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--admin", admin]) == EXIT_OK
    assert cells(capsys.readouterr().out.splitlines()[1])[:3] == ["m", "1", "100.0%"]


@pytest.mark.parametrize("page", ["", "/", "/metrics", "/fleet"])
def test_it_may_be_named_alone_and_by_any_of_its_pages(
    admin: str, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", admin + page]) == EXIT_OK
    assert cells(capsys.readouterr().out.splitlines()[1])[:3] == ["m", "1", "100.0%"]


NOBODY, NOT_ONE = "is a filter running there?", "not a filter's admin port"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:1", NOBODY),
        ("http://nowhere.invalid:9464", NOBODY),
        ("file:///etc", "expected http://HOST:PORT"),
        ("nonsense", "expected http://HOST:PORT"),
        ("127.0.0.1:9464", "such as http://127.0.0.1:9464"),
        ("http://127.0.0.1:port", NOT_ONE),
        ("http://", "expected http://HOST:PORT"),
    ],
)
def test_a_filter_that_cannot_be_asked_is_named(url: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", url]) == EXIT_FAILED
    told = capsys.readouterr().err
    assert url in told
    assert says in told
    assert len(told.splitlines()) == 1


def test_a_page_that_is_not_there_is_said(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", f"{admin}/deeper"]) == EXIT_FAILED
    assert f"{admin}/deeper/metrics: status 404: this is {NOT_ONE}" in capsys.readouterr().err


GRPC_GREETING = b"\x00\x00\x12\x04\x00\x00\x00\x00\x00"


@pytest.mark.parametrize("answer", [b"", GRPC_GREETING, b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe\xfd"])
def test_a_port_that_does_not_speak_as_a_filter_does_is_said(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """That of gRPC, for one: what is said there is no HTTP that is understood here."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert main(["report", f"http://127.0.0.1:{listening.getsockname()[1]}"]) == EXIT_FAILED
        thread.join()
    assert NOT_ONE in capsys.readouterr().err
