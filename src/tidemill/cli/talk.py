"""Where `chat` and `complete` get their text from: a model in this process, or a server at a URL."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import click
from click.core import ParameterSource

from tidemill.errors import ConfigError, TidemillError

if TYPE_CHECKING:
    from tidemill.engine.prepare import Prepared

Messages = list[dict[str, str]]


class Talker(Protocol):
    name: str

    def chat(self, messages: Messages, sampling: dict[str, Any]) -> Iterator[str]: ...
    def complete(self, prompt: str, sampling: dict[str, Any]) -> Iterator[str]: ...


class LocalTalker:
    """Loads the model here."""

    def __init__(self, model: str, engine: dict[str, Any], *, chats: bool) -> None:
        from tidemill.llm import LLM

        class TalkingLLM(LLM):
            def _accept(self, prepared: Prepared) -> None:
                if chats:
                    _refuse_without_template(model, prepared)

        self.name = model
        self._llm = TalkingLLM(model, **{"max_num_seqs": 1, **{k: v for k, v in engine.items() if v is not None}})

    def chat(self, messages: Messages, sampling: dict[str, Any]) -> Iterator[str]:
        template = self._llm.chat_template
        assert template is not None, "checked when the talker was opened"
        return self._stream(self._llm.tokenizer.encode(template.render(messages), add_special_tokens=False), sampling)

    def complete(self, prompt: str, sampling: dict[str, Any]) -> Iterator[str]:
        return self._stream(self._llm.tokenizer.encode(prompt), sampling)

    def _stream(self, prompt_ids: list[int], sampling: dict[str, Any]) -> Iterator[str]:
        from tidemill.core.params import SamplingParams

        given = {key: value for key, value in sampling.items() if value is not None}
        params = SamplingParams(**{"max_tokens": None, **self._llm.default_sampling, **given})
        for delta in self._llm.stream(prompt_ids, params):
            yield delta.text


def _refuse_without_template(model: str, prepared: Prepared) -> None:
    if prepared.chat_template is None:
        raise ConfigError(
            f"{model} has no chat template",
            param="chat_template",
            cause="it was not trained to chat, or its files lack the template",
            fix="use tidemill complete, or give --chat-template",
        )


class RemoteTalker:
    """Any OpenAI-compatible server."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        import httpx

        _check_address(url)
        key = api_key or os.environ.get("TIDEMILL_API_KEY") or os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._http = httpx.Client(headers=headers, timeout=httpx.Timeout(600, connect=10))
        self.name = model or self._first_model()

    def chat(self, messages: Messages, sampling: dict[str, Any]) -> Iterator[str]:
        for choice in self._events("chat/completions", {"messages": messages}, sampling):
            yield choice.get("delta", {}).get("content") or ""

    def complete(self, prompt: str, sampling: dict[str, Any]) -> Iterator[str]:
        for choice in self._events("completions", {"prompt": prompt}, sampling):
            yield choice.get("text") or ""

    def _first_model(self) -> str:
        request = self._http.build_request("GET", f"{self._base}/models")
        with self._answer(request) as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError):
                raise TidemillError(
                    f"{self._base}/models does not list models",
                    cause=_words(response.text) or "an empty answer",
                    fix="give the address of an OpenAI-compatible server, such as http://127.0.0.1:8000",
                ) from None

    @contextmanager
    def _answer(self, request: Any) -> Iterator[Any]:
        """The server's 200, or what went wrong, also while it is read."""
        import httpx

        response = None
        try:
            response = self._http.send(request, stream=True)
            if response.status_code != 200:
                response.read()
                raise TidemillError(
                    f"{self._base} answered {response.status_code}",
                    cause=_words(response.text),
                    fix=self._advice(response),
                )
            yield response
        except httpx.HTTPError as error:
            said = "broke off its answer" if response is not None else "does not answer"
            raise TidemillError(
                f"the server at {self._base} {said}",
                cause=str(error) or type(error).__name__,
                fix="see its log" if response is not None else "start one with: tidemill serve",
            ) from None
        finally:
            if response is not None:
                response.close()

    def _advice(self, response: Any) -> str:
        if response.status_code == 401:
            return "give its key with --api-key, or in TIDEMILL_API_KEY"
        if response.status_code in (429, 503):
            return f"try again in {response.headers.get('retry-after', 'a few')} s"
        return "correct what it names" if response.status_code < 500 else "see the server's log"

    def _events(self, route: str, body: dict[str, Any], sampling: dict[str, Any]) -> Iterator[dict[str, Any]]:
        given = {key: value for key, value in sampling.items() if value is not None}
        request = self._http.build_request(
            "POST", f"{self._base}/{route}", json={"model": self.name, "stream": True, **body, **given}
        )
        with self._answer(request) as response:
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise TidemillError("the answer broke off", cause=event["error"]["message"], fix="try again")
                yield from event["choices"]


def _check_address(url: str) -> None:
    import httpx

    cause, fix = "", f"--url http://{url}"
    try:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            cause = "it is not http://host:port"
    except httpx.InvalidURL as error:
        cause, fix = str(error), "--url http://127.0.0.1:8000"
    if cause:
        raise ConfigError(f"--url {url} is no address of a server", param="url", cause=cause, fix=fix)


def _words(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]


def open_talker(
    model: str | None, url: str | None, api_key: str | None, engine: dict[str, Any], *, chats: bool
) -> Talker:
    if url:
        _refuse("has no effect with --url: it belongs to the server", [name for name in engine if _was_given(name)])
        return RemoteTalker(url, model, api_key)
    _refuse("is for a server: it needs --url", ["api_key"] if api_key else [])
    return LocalTalker(model or "smollm2", engine, chats=chats)


def _was_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) == ParameterSource.COMMANDLINE


def _refuse(why: str, names: list[str]) -> None:
    for name in names:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} {why}", param=name, fix=f"leave {flag} out")
