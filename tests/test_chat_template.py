"""A rendered chat is, character for character, what transformers renders; what a template refuses is told by name."""

import json
from datetime import datetime

import gguf
import pytest
import tokenizers
from tokenizers import models

from tidemill.errors import ConfigError, InvalidRequest
from tidemill.text.chat import ChatTemplate, load_chat_template
from tidemill.weights.location import ModelFiles, locate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""  # noqa: E501

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == "skip" %}
        {%- continue %}
    {%- endif %}
    {%- set ns.last = loop.index0 %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == "assistant" and message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- generation %}{{- message.content }}{% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MULTIPART = """{{ bos_token }}{% for message in messages %}
[{{ message.role }}]
{% if message.content is string %}
{{ message.content | trim }}
{% else %}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}

{% endif %}
{% endfor %}
{% for document in documents or [] %}<doc>{{ document.title }}: {{ document.text }}</doc>{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""

DATED = "{{ strftime_now('%Y') }} {{ messages | length }} {{ messages | tojson(indent=2) }}"

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Für <Zürich> & 'co'", "parameters": {"type": "object"}},
    }
]

CHATS = {
    "one turn": [{"role": "user", "content": "Hi!"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi & <b>bye</b> "}],
    "three turns": [
        {"role": "user", "content": "日本語?"},
        {"role": "assistant", "content": "はい 👍", "reasoning_content": "\nthink\n"},
        {"role": "user", "content": "ok\n\n"},
    ],
    "reasoning under another name": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "because"},
        {"role": "user", "content": "c"},
    ],
}


def files(folder) -> ModelFiles:
    return ModelFiles("folder", folder, str(folder))


@pytest.fixture(scope="module")
def reference():
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def smollm2_source() -> str:
    template = load_chat_template(locate("smollm2"), None)
    assert template is not None
    return template.source


TEMPLATES = {"llama2": LLAMA2, "qwen": QWEN, "multipart": MULTIPART, "dated": DATED, "smollm2": None}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_transformers(reference, name, chat, add_generation_prompt):
    source = TEMPLATES[name] or smollm2_source()
    ours = ChatTemplate(source, SPECIAL).render(CHATS[chat], add_generation_prompt=add_generation_prompt)
    theirs = reference.apply_chat_template(
        CHATS[chat], chat_template=source, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert ours == theirs


def test_smollm2_says_its_system_prompt():
    template = load_chat_template(locate("smollm2"), None)
    assert template.render([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_documents_and_keywords_reach_the_template(reference):
    chat = CHATS["one turn"]
    call = {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    turns = [*chat, {"role": "assistant", "content": "", "tool_calls": [call]}]
    ours = ChatTemplate(QWEN, SPECIAL).render(turns, tools=TOOLS, enable_thinking=False)
    theirs = reference.apply_chat_template(
        turns, chat_template=QWEN, tools=TOOLS, enable_thinking=False, tokenize=False, add_generation_prompt=True
    )
    assert ours == theirs
    assert "Für <Zürich> & 'co'" in ours
    documents = [{"title": "T", "text": "body"}]
    ours = ChatTemplate(MULTIPART, SPECIAL).render(chat, documents=documents)
    theirs = reference.apply_chat_template(
        chat, chat_template=MULTIPART, documents=documents, tokenize=False, add_generation_prompt=True
    )
    assert ours == theirs


def test_the_clock_is_there():
    text = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}).render([])
    assert text == datetime.now().strftime("%d %b %Y")


class TestContinuing:
    @pytest.mark.parametrize("name", ["llama2", "qwen", "multipart", "smollm2"])
    @pytest.mark.parametrize("content", ["Sure, the", "Sure, the ", "Sure\n"])
    def test_the_final_message_stays_open(self, reference, name, content):
        source = TEMPLATES[name] or smollm2_source()
        chat = [{"role": "user", "content": "Tell me"}, {"role": "assistant", "content": content}]
        ours = ChatTemplate(source, SPECIAL).render(chat, add_generation_prompt=False, continue_final_message=True)
        theirs = reference.apply_chat_template(chat, chat_template=source, tokenize=False, continue_final_message=True)
        assert ours == theirs
        assert ours.rstrip().endswith(content.rstrip())
        assert chat[-1]["content"] == content

    def test_parts(self, reference):
        chat = [{"role": "assistant", "content": [{"type": "text", "text": "one"}, {"type": "image"}]}]
        ours = ChatTemplate(MULTIPART, SPECIAL).render(chat, add_generation_prompt=False, continue_final_message=True)
        theirs = reference.apply_chat_template(
            chat, chat_template=MULTIPART, tokenize=False, continue_final_message=True
        )
        assert ours == theirs

    def test_it_excludes_a_generation_prompt(self):
        with pytest.raises(InvalidRequest) as caught:
            ChatTemplate(QWEN, {}).render(CHATS["one turn"], add_generation_prompt=True, continue_final_message=True)
        assert caught.value.param == "continue_final_message"

    @pytest.mark.parametrize("chat", [[], [{"role": "assistant", "content": None}], [{"role": "assistant"}]])
    def test_there_must_be_text_to_continue(self, chat):
        with pytest.raises(InvalidRequest):
            ChatTemplate(QWEN, {}).render(chat, add_generation_prompt=False, continue_final_message=True)

    def test_a_template_that_drops_the_message(self):
        with pytest.raises(InvalidRequest, match="drops the final message"):
            ChatTemplate("fixed", {}).render(
                CHATS["one turn"], add_generation_prompt=False, continue_final_message=True
            )


class TestRefusals:
    def test_the_templates_own_words_reach_the_user(self):
        chat = [{"role": "assistant", "content": "me first"}]
        with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
            ChatTemplate(LLAMA2, SPECIAL).render(chat)
        assert caught.value.param == "messages"

    @pytest.mark.parametrize("chat", [[{"role": "user"}], [{"role": "user", "content": 3}], []])
    def test_data_a_template_does_not_expect(self, chat):
        with pytest.raises(InvalidRequest) as caught:
            ChatTemplate(LLAMA2, SPECIAL).render(chat)
        assert caught.value.param == "messages"

    def test_a_syntax_error_is_found_at_load_with_its_line(self, tmp_path):
        path = tmp_path / "bad.jinja"
        path.write_text("fine\n{% if %}\n")
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match="line 2"):
            load_chat_template(files(tmp_path), str(path))

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages.__class__.__mro__ }}",
            "{{ ''.__class__.__base__.__subclasses__() }}",
            "{% set _ = messages.append(1) %}",
            "{{ raise_exception.__globals__ }}",
        ],
    )
    def test_a_template_cannot_leave_its_sandbox(self, source):
        chat = [{"role": "user", "content": "x"}]
        try:
            text = ChatTemplate(source, {}).render(chat)
        except InvalidRequest:
            text = ""
        assert "class" not in text and "__builtins__" not in text
        assert chat == [{"role": "user", "content": "x"}]


class TestWhereTemplatesAre:
    def test_a_folder_without_one(self, tmp_path):
        assert load_chat_template(files(tmp_path), None) is None

    def test_tokenizer_config(self, tmp_path):
        config = {"chat_template": "{{ bos_token }}A", "bos_token": {"content": "<s>"}, "added_tokens_decoder": {}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert load_chat_template(files(tmp_path), None).render([]) == "<s>A"

    def test_named_templates_are_chosen_by_the_presence_of_tools(self, tmp_path):
        named = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools | length }} tools"},
        ]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        template = load_chat_template(files(tmp_path), None)
        assert template.render([]) == "plain"
        assert template.render([], tools=TOOLS) == "1 tools"

    def test_files_of_their_own_win(self, tmp_path):
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
        (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
        assert load_chat_template(files(tmp_path), None).source == "json"
        (tmp_path / "chat_template.jinja").write_text("jinja")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
        template = load_chat_template(files(tmp_path), None)
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
        template = load_chat_template(ModelFiles("gguf", tmp_path / "m.gguf", "m"), None)
        assert (template.render([]), template.render([], tools=TOOLS)) == ("<s>", "tools")

    def test_the_users_choice_wins_as_text_or_as_a_path(self, tmp_path):
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "own", "eos_token": "</s>"}')
        path = tmp_path / "mine.jinja"
        path.write_text("mine{{ eos_token }}")
        assert load_chat_template(files(tmp_path), str(path)).render([]) == "mine</s>"
        assert load_chat_template(files(tmp_path), "{{ 'text' }}").render([]) == "text"

    def test_a_path_that_is_not_there(self, tmp_path):
        with pytest.raises(ConfigError, match=r"nowhere\.jinja") as caught:
            load_chat_template(files(tmp_path), "nowhere.jinja")
        assert caught.value.param == "chat_template"
