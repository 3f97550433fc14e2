"""Templates come with models: none may take the process's time or memory, and what is useful still works."""

import pytest

from tidemill.errors import ConfigError, InvalidRequest
from tidemill.text.chat import ChatTemplate
from tidemill.text.template_budget import MAX_VALUE

CHAT = [{"role": "user", "content": "Hello"}]
DOUBLED = "{% set ns = namespace(x=(1,), y=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
LONG = "{% set b = 'a' * 30000000 %}"

ENDLESS = [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{% for a in range(100000) %}{{ range(100000) | reject | list }}{% endfor %}",
    f"{LONG}{{% for a in range(100000) %}}{{% if 'b' in b %}}{{% endif %}}{{% endfor %}}",
    f"{LONG}{{% set c = 'a' * 30000000 %}}{{% for a in range(100000) %}}{{% if b == c %}}{{% endif %}}{{% endfor %}}",
    f"{LONG}{{{{ b.rfind('b' + b[:15000000]) }}}}",
    f"{LONG}{{{{ b.strip('b' * 3000000 + 'a') }}}}",
    DOUBLED + "{{ {ns.x: 1} }}",
    DOUBLED + "{{ {}[ns.x] }}",
    DOUBLED + "{{ [ns.x] | map('default') | unique | list }}",
]

HUGE = [
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ messages | tojson(indent='x' * 1000000) }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ [1] * 10 ** 9 }}",
    "{{ range(100000) | list * 100000 }}",
    "{{ 'x'.rjust(10 ** 10) }}",
    "{{ 'x'.ljust(10 ** 10) }}",
    "{{ 'x'.center(10 ** 10) }}",
    "{{ 'x'.zfill(10 ** 10) }}",
    "{{ '\t'.expandtabs(10 ** 10) }}",
    "{{ '%1000000000s' % 'x' }}",
    "{{ '%*d' % (10 ** 9, 5) }}",
    "{{ '%(a%b)1000000000s' % {'a%b': 1} }}",
    "{{ '%1000000000s' | format('x') }}",
    "{{ '%1000000000d' is odd }}",
    "{{ '{:>1000000000}'.format('x') }}",
    "{{ '{:>{}}'.format('x', 10 ** 9) }}",
    "{{ ('{:>1000000000}' | safe).format('x') }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ 'a\nb' | indent(1000000000) }}",
    "{{ ['x'] | batch(10 ** 9, 'y') | list }}",
    "{{ 'x' | slice(10 ** 9) | list }}",
    "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "{{ range(100000) | join('x' * 100000) }}",
    "{{ ('x' * 100000).join(range(100000) | map('string')) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    f"{LONG}{{% for i in range(99) %}}{{{{ b }}}}{{% endfor %}}",
    f"{LONG}{{% set c %}}{{% for i in range(99) %}}{{{{ b }}}}{{% endfor %}}{{% endset %}}",
    f"{LONG}{{% set ns = namespace(x=[]) %}}{{% for i in range(99) %}}{{% set ns.x = ns.x + [b[1:]] %}}{{% endfor %}}",
]


@pytest.mark.parametrize("source", ENDLESS + HUGE)
def test_a_template_that_runs_on_or_grows_is_stopped(source):
    with pytest.raises(InvalidRequest, match="was stopped") as caught:
        ChatTemplate(source, {}, "chat_template.jinja").render(CHAT)
    assert "chat_template.jinja" in caught.value.message
    assert "--chat-template" in caught.value.fix


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum(n=100000) }}",
        "{{ 'a'.encode('punycode') }}",
        "{{ 'a'.translate({97: 'b' * 10000}) }}",
        "{{ (1).to_bytes(10 ** 9, 'big') }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% for x in [[1]] recursive %}{{ loop([[1], [1]]) }}{% endfor %}",
    ],
)
def test_what_cannot_be_bounded_is_not_there(source):
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ " + "+".join("1" * 3000) + " }}",
        "{% for a in b %}" * 60 + "{% endfor %}" * 60,
        "{{ " + "9" * 5000 + " }}",
        "{{ 'x' | urlize }}",
        "x" * 300_000,
    ],
)
def test_a_template_that_cannot_be_compiled_is_told_at_load(source):
    with pytest.raises(ConfigError) as caught:
        ChatTemplate(source, {})
    assert caught.value.param == "chat_template" and "--chat-template" in caught.value.fix


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' ~ 1 ~ none ~ [1, 'b'] }}",
        "{{ 'abcdef'[1:4] }}{{ [1, 2, 3][::-1] }}{{ messages[:1] }}",
        "{{ '%s: %5.1f%%' % ('a', 2) }}{{ '%(a)s' % {'a': 1} }}{{ '**%s** 1234567' % 'b' }}",
        "{{ '%d' | format(10 ** 12) }}{{ 'a' in ['a'] }}{{ (1, 2) in {(1, 2): 3} }}",
        "{{ '{:>5}|{a!r}|{}'.format('x', 'z', a='y') }}{{ '{a}'.format_map({'a': 1}) }}",
        "{{ 'a'.center(5) }}|{{ 'a' | center(5) }}|{{ 'a\nb' | indent(2, true) }}|{{ '7'.zfill(3) }}",
        "{{ [3, 1, 2] | sort | join(', ') }}{{ [1, 2] | sum }}{{ [[1], [2]] | sum(start=[]) }}",
        "{{ ['a', 'B'] | map('upper') | list }}{{ [1, 2, 3, 4] | select('odd') | list }}{{ [] | map('x') | list }}",
        "{{ [{'a': 1}, {'a': 2}] | selectattr('a', 'eq', 2) | map(attribute='a') | first }}{{ 4 is divisibleby 2 }}",
        "{{ 2 ** 10 }}{{ 7 % 3 }}{{ 'ab' * 2 }}{{ [0] * 2 }}{{ 1 < 2 < 3 }}",
        "{{ ' a b '.strip().split(' ') }}{{ 'a,b'.replace(',', ';') | replace(';', '-') }}{{ '-'.join(['a', 'b']) }}",
        "{{ {'b': 1, 'a': [none, true]} | tojson }}{{ {'b': 1} | tojson(indent=2, sort_keys=true) }}{{ 'x' | tojson }}",
        "{{ [1, 2] | tojson(separators=(',', ':')) }}{{ {'a': 1}.items() | list }}{{ {'a': 1} | dictsort }}",
        "{% for k, v in {'a': 1}.items() if v %}{{ loop.changed(k) }}{{ k }}{{ loop.last }}{% else %}-{% endfor %}",
        "{% macro m(x, y='d') %}<{{ x }}{{ y }}{{ caller() if caller }}>{% endmacro %}{% call m(1) %}in{% endcall %}",
        "{% filter upper %}abc{% endfilter %}{% set x | trim %}  y {% endset %}{{ x }}{% block z %}z{% endblock %}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{{ [1, 1, 2] | unique | list }}{{ [1, 2, 3] | batch(2, 0) | list }}{{ 2.5 | round | int }}",
        "{% autoescape true %}{{ '<' ~ '>' }}{% endautoescape %}{{ no_name }}{{ no_name | default('d') }}",
    ],
)  # fmt: skip
def test_everything_else_is_what_jinja2_makes_of_it(source):
    from transformers.utils.chat_template_utils import _compile_jinja_template

    expected = _compile_jinja_template(source).render(messages=CHAT, tools=None, documents=None)
    assert ChatTemplate(source, {}).render(CHAT) == expected


def test_a_long_chat_of_many_messages_is_within_the_budget():
    chat = [{"role": "user", "content": "word " * 200} for _ in range(4096)]
    source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + (m.content | length) %}"
    source += "{{ '<' + m.role + '>' + m.content | trim }}{% endfor %}{{ ns.n }}"
    assert ChatTemplate(source, {}).render(chat).endswith(str(4096 * 1000))


def test_a_text_as_long_as_a_body_may_be_is_rendered():
    text = "x" * (MAX_VALUE - 100)
    source = "{% for m in messages %}{{ '<u>' + m.content.strip() + '</u>' }}{% endfor %}"
    assert len(ChatTemplate(source, {}).render([{"role": "user", "content": text}])) == len(text) + 7
