"""A model's tokenizer and template, from the folder that engines load them from."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from extproc.model_files import BadModelFiles, load_pool_text

MODEL = Path(__file__).parents[2] / "enginesim" / "model"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer, and nothing else."""
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    return tmp_path


def rendered(folder: Path) -> str:
    template = load_pool_text(folder).template
    assert template is not None
    return template.render(HELLO)


def test_without_a_folder_there_is_nothing_to_read() -> None:
    text = load_pool_text(None)
    assert (text.tokenizer, text.template) == (None, None)


def test_a_folder_as_models_have_it() -> None:
    text = load_pool_text(MODEL)
    assert text.tokenizer is not None
    assert text.template is not None
    assert "hello" in text.template.render(HELLO)


def test_a_tokenizer_alone_serves_completions(folder: Path) -> None:
    text = load_pool_text(folder)
    assert text.tokenizer is not None
    assert text.template is None


def test_the_template_file_wins_over_the_setting(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"chat_template": "setting"}')
    assert rendered(folder) == "setting"
    (folder / "chat_template.jinja").write_text("file")
    assert rendered(folder) == "file"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}], "yes"),
        ([{"name": ["odd"]}, "odd", {"name": "default", "template": "yes"}], "yes"),
    ],
)
def test_of_named_templates_the_default_counts(folder: Path, template: object, text: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert rendered(folder) == text


@pytest.mark.parametrize("template", [None, 5, {}, [], [{"name": "tool_use", "template": "x"}], [{"name": "default"}]])
def test_what_is_no_template_is_none(folder: Path, template: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert load_pool_text(folder).template is None


def test_special_tokens_are_strings_or_objects_with_one(folder: Path) -> None:
    settings = {
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}|{{ add_bos_token }}",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "pad_token": None,
        "add_bos_token": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert rendered(folder) == "<s></s>|"


BREAKS: list[tuple[str, Callable[[Path], object]]] = [
    ("tokenizer.json", lambda path: path.unlink()),
    ("tokenizer.json", lambda path: path.write_text("{}")),
    ("tokenizer.json", lambda path: path.write_text("not json")),
    ("tokenizer.json", lambda path: path.write_bytes(b"\xff")),
    ("tokenizer_config.json", lambda path: path.write_text("[]")),
    ("tokenizer_config.json", lambda path: path.write_text("{")),
    ("tokenizer_config.json", lambda path: path.write_bytes(b'{"chat_template": "\xff"}')),
    ("tokenizer_config.json", lambda path: path.mkdir()),
    ("tokenizer_config.json", lambda path: path.write_text('{"chat_template": "{% if %}"}')),
    ("chat_template.jinja", lambda path: path.write_text("{% for %}")),
    ("chat_template.jinja", lambda path: path.write_bytes(b"\xff")),
    ("chat_template.jinja", lambda path: path.mkdir()),
]


@pytest.mark.parametrize(("name", "break_it"), BREAKS)
def test_a_fault_names_its_file(folder: Path, name: str, break_it: Callable[[Path], object]) -> None:
    break_it(folder / name)
    with pytest.raises(BadModelFiles) as caught:
        load_pool_text(folder)
    assert str(caught.value).startswith(f"{folder / name}: ")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadModelFiles, match=r"tokenizer\.json"):
        load_pool_text(tmp_path / "missing")
