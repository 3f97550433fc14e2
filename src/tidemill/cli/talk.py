"""Where `chat` and `complete` get their text from: a model in this process, or a server at a URL."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Protocol

from tidemill.errors import InvalidRequest, TidemillError

Messages = list[dict[str, str]]


class Talker(Protocol):
    name: str

    def chat(self, messages: Messages, sampling: dict[str, Any]) -> Iterator[str]: ...
    def complete(self, prompt: str, sampling: dict[str, Any]) -> Iterator[str]: ...


class LocalTalker:
    """Loads the model here."""

    def __init__(self, model: str, engine: dict[str, Any]) -> None:
        from tidemill.llm import LLM

        self.name = model
        self._llm = LLM(model, **{"max_num_seqs": 1, **{k: v for k, v in engine.items() if v is not None}})

    def chat(self, messages: Messages, sampling: dict[str, Any]) -> Iterator[str]:
        template = self._llm.chat_template
        if template is None:
            raise InvalidRequest(
                f"{self.name} has no chat template", fix="use tidemill complete, or give --chat-template"
            )
        return self._stream(self._llm.tokenizer.encode(template.render(messages), add_special_tokens=False), sampling)

    def complete(self, prompt: str, sampling: dict[str, Any]) -> Iterator[str]:
        return self._stream(self._llm.tokenizer.encode(prompt), sampling)

    def _stream(self, prompt_ids: list[int], sampling: dict[str, Any]) -> Iterator[str]:
        from tidemill.core.params import SamplingParams

        given = {key: value for key, value in sampling.items() if value is not None}
        params = SamplingParams(**{"max_tokens": None, **self._llm.default_sampling, **given})
        for delta in self._llm.stream(prompt_ids, params):
            yield delta.text


class RemoteTalker:
    """Any OpenAI-compatible server."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        import httpx

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
        return str(self._checked(lambda: self._http.get(f"{self._base}/models")).json()["data"][0]["id"])

    def _checked(self, call: Any) -> Any:
        import httpx

        try:
            response = call()
        except httpx.TransportError as error:
            raise TidemillError(
                f"no server answers at {self._base}", cause=str(error), fix="start one with: tidemill serve"
            ) from None
        if response.status_code != 200:
            response.read()
            raise TidemillError(f"{self._base} answered {response.status_code}", cause=_words(response.text))
        return response

    def _events(self, route: str, body: dict[str, Any], sampling: dict[str, Any]) -> Iterator[dict[str, Any]]:
        given = {key: value for key, value in sampling.items() if value is not None}
        request = self._http.build_request(
            "POST", f"{self._base}/{route}", json={"model": self.name, "stream": True, **body, **given}
        )
        response = self._checked(lambda: self._http.send(request, stream=True))
        try:
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise TidemillError(event["error"]["message"])
                yield from event["choices"]
        finally:
            response.close()


def _words(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]


def open_talker(model: str | None, url: str | None, api_key: str | None, engine: dict[str, Any]) -> Talker:
    return RemoteTalker(url, model, api_key) if url else LocalTalker(model or "smollm2", engine)
