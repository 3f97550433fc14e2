"""A rendered chat is, character for character, what transformers renders; what a template refuses is told by name."""

import json
from datetime import datetime

import pytest
import tokenizers
from tokenizers import models

from tests.helpers.chat_templates import COMMAND_R, FAMILIES, GRANITE, LLAMA31, PARTS_ONLY, PARTS_OR_TEXT, QWEN3, QWEN25
from tidemill.errors import ConfigError, InvalidRequest, UnsupportedParameter
from tidemill.text.chat import ChatTemplate
from tidemill.text.chat_files import load_chat_template
from tidemill.text.chat_input import check_messages
from tidemill.text.template_environment import plain
from tidemill.weights.location import ModelFiles, locate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

LLAMA2 = """{% if messages[0].role == 'system' %}{% set first, said = messages[0].content, messages[1:] %}
{%- else %}{% set first, said = none, messages %}{% endif %}
{%- for turn in said %}
{%- if turn.role != ('user', 'assistant')[loop.index0 % 2] %}
{{- raise_exception('Conversation roles must alternate: turn ' ~ loop.index ~ ' is from ' ~ turn.role) }}
{%- endif %}
{%- set text = turn.content.strip() %}
{%- if loop.first and first is not none %}{% set text = '<<SYS>>\\n' + first + '\\n<</SYS>>\\n\\n' + text %}{% endif %}
{%- if turn.role == 'user' %}{{ bos_token + '[INST] ' + text + ' [/INST]' }}
{%- else %}{{ ' ' + text + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

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


def load(place, override=None, special=SPECIAL) -> ChatTemplate | None:
    return load_chat_template([place if isinstance(place, ModelFiles) else files(place)], special, override)


def smollm2_source() -> str:
    template = load(locate("smollm2"))
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
    template = load(locate("smollm2"))
    assert template.render([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_documents_and_keywords_reach_the_template(reference):
    chat = CHATS["one turn"]
    call = {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    turns = [*chat, {"role": "assistant", "content": "", "tool_calls": [call]}]
    ours = ChatTemplate(QWEN, SPECIAL).render(turns, tools=TOOLS, kwargs={"enable_thinking": False})
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
            load(tmp_path, str(path))

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


TEXT_PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


class TestContent:
    """Content is text or a list of parts; a template that loops over it takes parts, as vLLM tells."""

    @pytest.mark.parametrize(
        ("source", "wanted"),
        [
            *((source, "string") for name, source in FAMILIES.items() if name != "parts or text"),
            (PARTS_ONLY, "openai"),
            (PARTS_OR_TEXT, "openai"),
            (MULTIPART, "openai"),
            ("{% for m in messages[1:] %}{% set c = m.content %}{% for part in c %}{% endfor %}{% endfor %}", "openai"),
            ("{% set ns = namespace(turns=messages) %}{% for m in ns.turns %}{% for p in m['content'] %}{% endfor %}"
             "{% endfor %}", "openai"),
            ("{% set last = messages | last %}{% for p in last.get('content') or [] %}{% endfor %}", "openai"),
            ("{% for m in messages %}{% for line in m.content.split('x') %}{% endfor %}{% endfor %}", "string"),
            ("{% for m in messages %}{% for call in m.tool_calls %}{{ call }}{% endfor %}{% endfor %}", "string"),
        ],
    )  # fmt: skip
    def test_the_format_is_read_from_the_template(self, source, wanted):
        assert ChatTemplate(source, {}).content_format == wanted

    def test_parts_become_lines_where_a_template_takes_text(self):
        chat = [{"role": "user", "content": TEXT_PARTS}]
        assert "<|im_start|>user\none\ntwo<|im_end|>" in ChatTemplate(QWEN25, SPECIAL).render(chat)
        assert ChatTemplate(QWEN25, SPECIAL).render(chat) == ChatTemplate(QWEN25, SPECIAL).render(
            [{"role": "user", "content": "one\ntwo"}]
        )

    @pytest.mark.parametrize("source", [PARTS_ONLY, PARTS_OR_TEXT, MULTIPART])
    def test_parts_stay_parts_where_a_template_loops_over_them(self, reference, source):
        chat = [{"role": "user", "content": TEXT_PARTS}]
        expected = reference.apply_chat_template(chat, chat_template=source, tokenize=False, add_generation_prompt=True)
        assert ChatTemplate(source, SPECIAL).render(chat) == expected
        assert "onetwo" in expected

    def test_text_becomes_a_part_where_a_template_only_loops(self, reference):
        """transformers would give it the letters one by one."""
        as_parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
        expected = reference.apply_chat_template(
            as_parts, chat_template=PARTS_ONLY, tokenize=False, add_generation_prompt=True
        )
        assert ChatTemplate(PARTS_ONLY, SPECIAL).render([{"role": "user", "content": "Hello"}]) == expected
        assert "Hello" in expected

    def test_a_format_that_is_asked_for_wins(self):
        chat = [{"role": "user", "content": TEXT_PARTS}]
        template = ChatTemplate("{{ messages[0].content | tojson }}", {})
        assert template.render(chat) == '"one\\ntwo"'
        assert json.loads(template.render(chat, content_format="openai")) == TEXT_PARTS
        text = [{"role": "user", "content": "Hello"}]
        assert json.loads(template.render(text, content_format="openai")) == [{"type": "text", "text": "Hello"}]
        assert ChatTemplate(PARTS_OR_TEXT, SPECIAL).render(chat, content_format="string").count("one\ntwo") == 1

    @pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, {"type": "text"}, "text", 5])
    def test_what_is_no_text_is_refused(self, part):
        chat = [{"role": "user", "content": [part]}]
        with pytest.raises(InvalidRequest, match="text model"):
            check_messages(chat)
        with pytest.raises(InvalidRequest, match="text model"):
            ChatTemplate(QWEN25, SPECIAL).render(chat)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (QWEN3, {"messages", "tools", "add_generation_prompt", "enable_thinking"}),
        (LLAMA31, {"messages", "tools", "add_generation_prompt", "bos_token", "custom_tools", "date_string",
                   "tools_in_user_message"}),
        (GRANITE, {"messages", "tools", "add_generation_prompt", "documents", "controls"}),
        ("{% if a %}{% set b = 1 %}{% else %}{% set b = 2 %}{% endif %}{{ b }}", {"a"}),
        ("{% set a = a + 1 %}{% set b = [] %}{% for c in b %}{{ c }}{% endfor %}", {"a"}),
        ("{% set b = 1 %}{{ namespace(x=b).x }}{{ strftime_now('%Y') }}", set()),
    ],
)  # fmt: skip
def test_the_variables_of_a_template_are_those_it_reads_from_outside(source, names):
    assert ChatTemplate(source, {}).variables == names


class TestUnread:
    """What a template does not read would be ignored: it is refused by name, with what would work."""

    def refused(self, source, *args, **kwargs) -> UnsupportedParameter:
        with pytest.raises(UnsupportedParameter) as caught:
            ChatTemplate(source, SPECIAL).refuse_unread(*args, **kwargs)
        assert caught.value.fix
        return caught.value

    def passes(self, source, *args, **kwargs) -> bool:
        return ChatTemplate(source, SPECIAL).refuse_unread(*args, **kwargs) is None

    def test_what_is_read_passes(self):
        assert self.passes(LLAMA31, tools=TOOLS, kwargs={"date_string": "x", "custom_tools": []})
        said = [{"role": "assistant", "content": "", "tool_calls": [{}], "reasoning": "r"}]
        assert self.passes(QWEN3, said, tools=TOOLS)
        assert self.passes(GRANITE, tools=TOOLS, documents=[{"text": "x"}], kwargs={"controls": {}})
        assert self.passes(COMMAND_R, tools=TOOLS)

    def test_nothing_given_is_nothing_ignored(self):
        assert self.passes("fixed", [{"role": "user", "tool_calls": []}], tools=[], documents=[], kwargs={})
        assert self.refused("fixed", tools=TOOLS).param == "tools"

    def test_tools_and_documents(self):
        assert self.refused(FAMILIES["gemma"], tools=TOOLS).param == "tools"
        assert self.refused(QWEN25, documents=[{"text": "x"}]).param == "documents"

    def test_another_of_the_models_templates_is_named(self):
        problem = self.refused(COMMAND_R, documents=[{"text": "x"}])
        assert problem.param == "documents"
        assert "--chat-template rag" in problem.fix

    def test_keywords(self):
        problem = self.refused(QWEN3, kwargs={"enable_dreaming": True})
        assert problem.param == "chat_template_kwargs.enable_dreaming"
        assert "enable_thinking" in problem.fix

    def test_fields_of_messages(self):
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]
        assert self.refused(FAMILIES["phi 3"], turns).param == "messages[1].tool_calls"
        turns = [{"role": "assistant", "content": "", "reasoning_content": "hm"}]
        assert self.refused(QWEN25, turns).param == "messages[0].reasoning_content"

    @pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt"])
    def test_keywords_cannot_stand_in_for_parameters(self, name):
        with pytest.raises(InvalidRequest, match=name):
            ChatTemplate(QWEN3, SPECIAL).refuse_unread(kwargs={name: []})


class TestSandbox:
    @pytest.mark.parametrize(
        "source",
        [
            "{% set ns = namespace(__class__=1) %}{{ ns }}",
            "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
            "{% set ns = namespace({'_x': 1}) %}",
            "{{ dict.mro() }}",
            "{{ dict.__subclasses__() }}",
        ],
    )
    def test_scratch_space_leads_nowhere(self, source):
        with pytest.raises(InvalidRequest):
            ChatTemplate(source, {}).render([])

    def test_scratch_space_works(self):
        source = "{% set ns = namespace({'a': 1}, self=2) %}{% set ns.b = 3 %}{{ ns.a }}{{ ns.self }}{{ ns.b }}"
        source += "{{ dict(a=1).a }}{{ dict.fromkeys('xy', 0).y }}"
        assert ChatTemplate(source, {}).render([]) == "12310"

    def test_templates_see_plain_data_only(self):
        class Text(str):
            def leave(self):
                return "out"

        class Model:
            def model_dump(self):
                return {"role": "user"}

        assert type(plain(Text("x"))) is str
        assert plain([Text("x"), (1, True), {"a": Model()}, object]) == [
            "x",
            [1, True],
            {"a": {"role": "user"}},
            "<type>",
        ]
        chat = [{"role": "user", "content": Text("hi")}]
        with pytest.raises(InvalidRequest):
            ChatTemplate("{{ messages[0].content.leave() }}", {}).render(chat)
