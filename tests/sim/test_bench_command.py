"""`python -m bench` says what there is to run."""

import pytest

from bench.__main__ import _PARTS, main


def test_help_lists_each_part_with_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for name, part in _PARTS.items():
        assert [line.split(None, 1)[1] for line in lines if line.split(None, 1)[:1] == [name]] == [part.what]


def test_a_part_that_is_not_there_is_named_beside_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["index", "edges"])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert not told.out
    assert "no such part: edges; there are index, domain" in told.err
