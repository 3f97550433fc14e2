"""Where a chat template comes from: the model's own files in every form they have, or the user's."""

import json

import gguf
import pytest

from tests.helpers.chat_templates import COMMAND_R
from tests.test_chat_template import TOOLS, files, load
from tidemill.errors import BadCheckpoint, ConfigError, StartupError
from tidemill.text.chat_files import load_chat_template
from tidemill.weights.location import ModelFiles


class TestWhereTemplatesAre:
    def test_a_folder_without_one(self, tmp_path):
        assert load(tmp_path) is None

    def test_tokenizer_config(self, tmp_path):
        config = {"chat_template": "{{ bos_token }}A", "bos_token": {"content": "<s>"}, "added_tokens_decoder": {}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert load(tmp_path).render([]) == "<s>A"

    def test_named_templates_are_chosen_by_the_presence_of_tools(self, tmp_path):
        named = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools | length }} tools"},
        ]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        template = load(tmp_path)
        assert template.render([]) == "plain"
        assert template.render([], tools=TOOLS) == "1 tools"

    def test_files_of_their_own_win(self, tmp_path):
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
        (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
        assert load(tmp_path).source == "json"
        (tmp_path / "chat_template.jinja").write_text("jinja")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
        template = load(tmp_path)
        assert (template.render([]), template.render([], tools=TOOLS)) == ("jinja", "tools")

    def test_gguf_metadata(self, tmp_path):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.add_token_list(["<s>", "</s>"])
        writer.add_bos_token_id(0)
        writer.add_chat_template(
            [{"name": "default", "template": "{{ bos_token }}"}, {"name": "tool_use", "template": "tools"}]
        )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        template = load(ModelFiles("gguf", tmp_path / "m.gguf", "m"))
        assert (template.render([]), template.render([], tools=TOOLS)) == ("<s>", "tools")

    def test_the_users_choice_wins_as_text_or_as_a_path(self, tmp_path):
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "own", "eos_token": "</s>"}')
        path = tmp_path / "mine.jinja"
        path.write_text("mine{{ eos_token }}")
        assert load(tmp_path, str(path)).render([]) == "mine</s>"
        assert load(tmp_path, "{{ 'text' }}").render([]) == "text"

    def test_the_name_of_one_of_the_models_templates_is_a_choice(self, tmp_path):
        named = [{"name": name, "template": text} for name, text in COMMAND_R.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        template = load(tmp_path, "rag")
        assert template.source == COMMAND_R["rag"]
        template.refuse_unread(documents=[{"text": "x"}])
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, "ragg")
        assert "rag" in caught.value.cause and "tool_use" in caught.value.cause

    def test_a_template_that_is_no_text_is_told_at_load(self, tmp_path):
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default"}]}')
        with pytest.raises(BadCheckpoint, match=r"tokenizer_config\.json"):
            load(tmp_path)

    def test_the_first_place_that_has_one_counts(self, tmp_path):
        """A tokenizer taken from elsewhere brings its template along."""
        model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
        for folder in (model, tokenizer):
            folder.mkdir()
        (model / "chat_template.jinja").write_text("model")
        places = [files(tokenizer), files(model)]
        assert load_chat_template(places, {}).source == "model"
        (tokenizer / "chat_template.jinja").write_text("tokenizer")
        assert load_chat_template(places, {}).source == "tokenizer"

    def test_a_path_that_is_not_there(self, tmp_path):
        with pytest.raises(ConfigError, match=r"nowhere\.jinja") as caught:
            load(tmp_path, "nowhere.jinja")
        assert caught.value.param == "chat_template"

    BROKEN = [  # noqa: RUF012
        ("chat_template.jinja", b"{% if %}"),
        ("chat_template.jinja", b"\xff\xfe"),
        ("chat_template.jinja", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
    ]

    @pytest.mark.parametrize(("name", "content"), BROKEN)
    def test_a_broken_template_of_the_model_is_replaced_by_the_users(self, tmp_path, name, content):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(StartupError):
            load(tmp_path)
        path = tmp_path / "mine.jinja"
        path.write_text("mine")
        assert load(tmp_path, str(path)).render([]) == "mine"
        assert load(tmp_path, "{{ 'text' }}").render([]) == "text"

    def test_a_git_lfs_pointer_is_no_template(self, tmp_path):
        (tmp_path / "chat_template.jinja").write_bytes(self.BROKEN[2][1])
        with pytest.raises(BadCheckpoint, match="Git LFS") as caught:
            load(tmp_path)
        assert "git lfs pull" in caught.value.fix
