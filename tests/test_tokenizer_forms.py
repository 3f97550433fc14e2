"""Every form a Hugging Face folder keeps its tokens in: ids, text and special flags are those of AutoTokenizer."""

import base64
import json
import shutil
import sys
from itertools import pairwise
from typing import ClassVar

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.helpers.texts import PLAIN, random_texts
from tests.test_tokenizer import files, write_byte_level_folder, write_llama_folder
from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.text.byte_alphabet import BYTE_OF
from tidemill.text.chat_files import load_chat_template
from tidemill.text.llama_class import READ_AS_SAVED
from tidemill.text.tokenizer import load_tokenizer

DECODER = {
    "400": {"content": "<|user|>", "special": True, "normalized": False},
    "401": {"content": "<tool>", "special": False, "normalized": False, "lstrip": True},
    "402": {"content": "<x>", "special": False, "normalized": True, "single_word": True, "rstrip": True},
}
ADDED = {"<tool>": 401, "<|user|>": 400, "<img>": 500}
MAP = {
    "pad_token": "<|user|>",
    "eos_token": {"content": "<|end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False},
    "mask_token": {"content": "<mask>", "lstrip": True},
    "additional_special_tokens": ["<|im_end|>", "<x>"],
}


def json_folder(folder, *, added=None, special_map=None, **config):
    write_byte_level_folder(folder, **config)
    write_neighbours(folder, added, special_map)


def write_neighbours(folder, added=None, special_map=None):
    for name, value in (("added_tokens.json", added), ("special_tokens_map.json", special_map)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))


def llama_folder(folder, model_type="llama", **config):
    write_llama_folder(folder, **config)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def slow_folder(folder, *, special, added=None, special_map=None, model_type="gpt2", **config):
    """A vocabulary and its merges, in two files and no tokenizer.json."""
    trained = trained_bpe(special)
    (folder / "vocab.json").write_text(json.dumps(trained["vocab"]))
    merges = [" ".join(pair) for pair in trained["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    write_neighbours(folder, added, special_map)


def trained_bpe(special=(), size=600) -> dict:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    backend.train_from_iterator(random_texts(300, PLAIN, seed=5), trainer)
    return json.loads(backend.to_str())["model"]


ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
FORMS = {
    "added_tokens_decoder": (json_folder, {"added_tokens_decoder": DECODER}),
    "additional_special_tokens": (
        json_folder,
        {"added_tokens_decoder": DECODER, "additional_special_tokens": ["<|im_end|>", "<tool>"]},
    ),
    "named extra tokens": (
        json_folder,
        {"added_tokens_decoder": DECODER, "extra_special_tokens": {"image_token": "<img>"}},
    ),
    "a token with a name of its own": (json_folder, {"image_token": "<img>", "bos_token": "<s>"}),
    "added_tokens.json": (json_folder, {"added": ADDED}),
    "special_tokens_map.json": (json_folder, {"special_map": MAP}),
    "all older files": (json_folder, {"added": ADDED, "special_map": MAP, "additional_special_tokens": ["<tool>"]}),
    "older files that no longer count": (
        json_folder,
        {"added": {"<img>": 500}, "special_map": MAP, "added_tokens_decoder": DECODER},
    ),
    "the class of llama": (llama_folder, {"tokenizer_class": "LlamaTokenizer"}),
    "the class of llama, legacy": (llama_folder, {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}),
    "the class of llama, not legacy": (llama_folder, {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
    "the class of llama, no prefix": (llama_folder, {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
    "the class of llama in a mistral": (llama_folder, {"tokenizer_class": "LlamaTokenizer", "model_type": "mistral"}),
    "gpt-2": (slow_folder, {"special": ["<|end|>"], "tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"}),
    "gpt-2 with all older files": (
        slow_folder,
        {"special": ["<|end|>"], "tokenizer_class": "GPT2Tokenizer", "added": ADDED, "special_map": MAP},
    ),
    "gpt-2 with added_tokens_decoder": (
        slow_folder,
        {"special": ["<|end|>"], "tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": DECODER},
    ),
    "roberta": (
        slow_folder,
        {"special": ROBERTA, "tokenizer_class": "RobertaTokenizer", "model_type": "roberta", "added": ADDED},
    ),
    "qwen 2": (
        slow_folder,
        {
            "special": [],
            "tokenizer_class": "Qwen2Tokenizer",
            "model_type": "qwen2",
            "eos_token": "<|im_end|>",
            "pad_token": "<|end|>",
            "added": {"<|end|>": 600, "<|im_end|>": 601},
            "additional_special_tokens": ["<|im_end|>"],
        },
    ),
}


@pytest.fixture(scope="module", params=FORMS)
def pair(request, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("form")
    write, options = FORMS[request.param]
    write(folder, **options)
    return load_tokenizer(files(folder)), AutoTokenizer.from_pretrained(folder)


def check_equal(ours, theirs, texts):
    for text in texts:
        for adds in (True, False):
            expected = theirs(text, add_special_tokens=adds, truncation=False)["input_ids"]
            assert ours.encode(text, adds) == expected, repr(text)
        for skips in (True, False):
            assert ours.decode(expected, skips) == theirs.decode(expected, skip_special_tokens=skips), repr(text)


def test_hundreds_of_texts_have_the_ids_of_transformers(pair):
    check_equal(*pair, random_texts(300))


def test_added_and_special_tokens_are_those_of_transformers(pair):
    ours, theirs = pair
    added = ours.backend.get_added_tokens_decoder()
    assert {token_id: (token.content, token.special) for token_id, token in added.items()} == {
        token_id: (token.content, token.special) for token_id, token in theirs.added_tokens_decoder.items()
    }
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))


def test_ids_that_are_no_token_are_no_text(pair):
    """Models have rows to spare, so any id below their number can be sampled."""
    ours, _ = pair
    ids = ours.encode("Hello world", add_special_tokens=False)
    for unknown in (ours.vocab_size + 7, 10**6):
        assert not ours.knows(unknown)
        assert ours.decode([unknown]) == ours.token_text(unknown) == ""
        assert ours.decode([*ids, unknown, *ids]) == ours.decode([*ids, *ids])


def test_the_types_that_transformers_reads_as_saved_are_still_those():
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    plain = {"TokenizersBackend", "MistralCommonBackend"}
    assert {TOKENIZER_MAPPING_NAMES.get(model_type) for model_type in READ_AS_SAVED} <= plain


def merged_as_tiktoken(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """What tiktoken does: join the neighbours whose joined bytes have the lowest rank, until none have one."""
    parts = [bytes([byte]) for byte in word] if word not in ranks else [word]
    while True:
        joined = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not joined:
            return [ranks[part] for part in parts]
        _, at = min(joined)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def ranks_of(trained: dict) -> dict[bytes, int]:
    """A trained vocabulary as bytes and ranks."""
    return {bytes(BYTE_OF[character] for character in token): rank for token, rank in trained["vocab"].items()}


def base64_of(token: bytes) -> str:
    return base64.b64encode(token).decode()


class TestTekken:
    """Mistral's tekken.json, alone in a folder."""

    PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

    def write(self, folder, ranks, special=None, num_special=30, spare=5):
        """As Mistral writes it: more tokens than are used, special ones apart, some of them without a name."""
        entries = [
            {"rank": rank, "token_bytes": base64_of(token), "token_str": None}
            for token, rank in sorted(ranks.items(), key=lambda item: item[1])
        ]
        config = {
            "pattern": self.PATTERN,
            "num_vocab_tokens": len(entries),
            "default_vocab_size": len(entries) - spare + num_special,
            "default_num_special_tokens": num_special,
            "version": "v3",
        }
        data = {"config": config, "vocab": entries} | ({} if special is None else {"special_tokens": special})
        (folder / "tekken.json").write_text(json.dumps(data))
        (folder / "config.json").write_text('{"model_type": "mistral"}')

    def test_words_are_merged_as_tiktoken_does(self, tmp_path):
        ranks = ranks_of(trained_bpe())
        self.write(tmp_path, ranks)
        tokenizer = load_tokenizer(files(tmp_path))
        kept = {token: rank for token, rank in ranks.items() if rank < len(ranks) - 5}
        for word in ("Hello", "camelCaseHello", "日本語日本", "aaaaaaa", "हिन्दी"):
            expected = [30 + rank for rank in merged_as_tiktoken(word.encode(), kept)]
            assert tokenizer.encode(word, add_special_tokens=False) == expected
            assert tokenizer.decode(expected) == word

    def test_special_tokens_come_first_and_texts_start_with_one(self, tmp_path):
        self.write(tmp_path, ranks_of(trained_bpe()))
        tokenizer = load_tokenizer(files(tmp_path))
        assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
        assert tokenizer.encode("Hello")[0] == 1
        assert tokenizer.encode("[INST]", add_special_tokens=False) == [3]
        assert tokenizer.special_ids == set(range(30))
        assert tokenizer.decode([29], skip_special_tokens=False) == "<SPECIAL_29>"
        assert tokenizer.special_tokens_map["pad_token"] == "<pad>"

    def test_special_tokens_may_be_listed(self, tmp_path):
        listed = ["<unk>", "<s>", "</s>", "[THINK]"]
        special = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(listed)]
        self.write(tmp_path, ranks_of(trained_bpe()), special, num_special=6)
        tokenizer = load_tokenizer(files(tmp_path))
        assert tokenizer.encode("[THINK]", add_special_tokens=False) == [3]
        assert tokenizer.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

    def test_tokenizer_json_wins(self, tmp_path):
        self.write(tmp_path, ranks_of(trained_bpe()))
        write_byte_level_folder(tmp_path)
        assert load_tokenizer(files(tmp_path)).eos_id == 0

    @pytest.mark.parametrize("text", ["[]", "{}", '{"config": {}, "vocab": []}', '{"config": {"pattern": "("}}'])
    def test_a_broken_file_is_named(self, tmp_path, text):
        (tmp_path / "tekken.json").write_text(text)
        with pytest.raises(BadCheckpoint, match=r"tekken\.json"):
            load_tokenizer(files(tmp_path))

    FAULTS: ClassVar = {
        "a pattern": (lambda data: data["config"].update(pattern="("), "config.pattern is no regular expression"),
        "a pattern that is no text": (lambda data: data["config"].update(pattern=7), "config.pattern"),
        "a config that is a list": (lambda data: data.update(config=[1]), "config is a list"),
        "a vocab that is an object": (lambda data: data.update(vocab={}), "vocab is a dict"),
        "fewer tokens than special ones": (
            lambda data: data["config"].update(default_vocab_size=3),
            "default_vocab_size is 3, less than the 30 special tokens",
        ),
        "a size that is no number": (lambda data: data["config"].update(default_vocab_size="x"), "default_vocab_size"),
        "a size below zero": (lambda data: data["config"].update(default_vocab_size=-1), "default_vocab_size"),
        "special tokens without end": (
            lambda data: data["config"].update(default_num_special_tokens=10**12),
            "config.default_num_special_tokens is 1000000000000",
        ),
        "a token that is not base64": (
            lambda data: data["vocab"][7].update(token_bytes="?QQ=="),
            "vocab[7].token_bytes",
        ),
        "a token twice": (lambda data: data["vocab"].insert(8, data["vocab"][7]), "vocab[7] and vocab[8]"),
        "a byte without a token": (lambda data: data["vocab"].pop(0), "no token for 1 of the 256 bytes"),
        "special tokens that are numbers": (lambda data: data.update(special_tokens=[1]), "special_tokens holds 1"),
        "a special token below zero": (
            lambda data: data.update(special_tokens=[{"rank": -1, "token_str": "<s>"}]),
            "a special token has rank -1",
        ),
    }

    @pytest.mark.parametrize("fault", FAULTS)
    def test_the_faulty_part_is_named(self, tmp_path, fault):
        self.write(tmp_path, ranks_of(trained_bpe()))
        data = json.loads((tmp_path / "tekken.json").read_text())
        spoil, cause = self.FAULTS[fault]
        spoil(data)
        (tmp_path / "tekken.json").write_text(json.dumps(data))
        with pytest.raises(BadCheckpoint, match=r"tekken\.json is not a tekken vocabulary") as caught:
            load_tokenizer(files(tmp_path))
        assert cause in caught.value.cause

    def test_a_real_file_gives_the_ids_of_mistral_common(self, tmp_path):
        reference, path = mistral_common_data("tekken_240911.json")
        shutil.copy(path, tmp_path / "tekken.json")
        (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
        ours, theirs = load_tokenizer(files(tmp_path)), reference.Tekkenizer.from_file(path)
        for text in random_texts(400, PLAIN):
            for bos in (True, False):
                assert ours.encode(text, add_special_tokens=bos) == theirs.encode(text, bos=bos, eos=False)
        assert (ours.vocab_size, ours.special_ids) == (theirs.n_words, theirs.special_ids)

    def test_its_chat_is_that_of_mistral_common(self, tmp_path):
        _, path = mistral_common_data("tekken_240911.json")
        from mistral_common.protocol.instruct.request import ChatCompletionRequest
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        shutil.copy(path, tmp_path / "tekken.json")
        tokenizer = load_tokenizer(files(tmp_path))
        template = load_chat_template([tokenizer.files], tokenizer.special_tokens_map)
        assert "tools" in template.variables
        assert "mistral-common" in template.origin
        chat = [
            {"role": "user", "content": "Hello, 日本"},
            {"role": "assistant", "content": "Hi!"},
            {"role": "user", "content": " And\nnow? "},
        ]
        theirs = MistralTokenizer.from_file(path).encode_chat_completion(ChatCompletionRequest(messages=chat))
        assert tokenizer.encode(template.render(chat), add_special_tokens=False) == theirs.tokens

    def test_without_the_package_the_missing_template_is_explained(self, tmp_path, monkeypatch, caplog):
        self.write(tmp_path, ranks_of(trained_bpe()))
        # What an import finds of a package that is not there, also where it is.
        monkeypatch.setitem(sys.modules, "mistral_common.integrations.chat_templates.chat_templates", None)
        assert load_chat_template([files(tmp_path)], {}) is None
        assert "pip install mistral-common" in caplog.text
        assert load_tokenizer(files(tmp_path)).encode("Hello")


def mistral_common_data(name):
    """The module, and a vocabulary that comes with the package."""
    reference = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    from importlib.resources import files as resources

    return reference, resources("mistral_common") / "data" / name


class TestTiktoken:
    """Tables of base64 tokens and ranks, as Llama 3 and the first Qwen have them."""

    def write(self, folder, name="tokenizer.model", model_type="llama", **config):
        ranks = ranks_of(trained_bpe())
        lines = [f"{base64_of(token)} {rank}" for token, rank in ranks.items()]
        (folder / name).write_text("\n".join(lines) + "\n")
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        if config:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return ranks

    def test_special_tokens_named_by_the_config_stand_at_their_ids(self, tmp_path):
        pytest.importorskip("tiktoken")
        from transformers import AutoTokenizer

        end = len(trained_bpe()["vocab"])
        named = ["<|begin|>", "<|end|>", "<|user|>"]
        decoder = {
            str(end + at): {"content": token, "special": True, "normalized": False} for at, token in enumerate(named)
        }
        names = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "add_bos_token": True}
        self.write(tmp_path, tokenizer_class="PreTrainedTokenizerFast", added_tokens_decoder=decoder, **names)
        ours, theirs = load_tokenizer(files(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
        check_equal(ours, theirs, random_texts(300))
        assert ours.encode("<|user|>") == [end, end + 2]
        assert ours.special_ids == {end, end + 1, end + 2}

    def test_llama_3_is_known(self, tmp_path):
        end = len(self.write(tmp_path))
        tokenizer = load_tokenizer(files(tmp_path))
        assert tokenizer.encode("<|begin_of_text|><|eot_id|>", add_special_tokens=False) == [end, end + 9]
        assert tokenizer.encode("x")[0] == tokenizer.bos_id == end
        assert tokenizer.vocab_size == end + 256
        assert tokenizer.decode([end + 2, end + 255], skip_special_tokens=False) == (
            "<|reserved_special_token_0|><|reserved_special_token_247|>"
        )

    def test_qwen_is_known_by_the_name_of_its_file(self, tmp_path):
        end = len(self.write(tmp_path, "qwen.tiktoken", "llama"))
        tokenizer = load_tokenizer(files(tmp_path))
        assert tokenizer.encode("<|im_start|>", add_special_tokens=False) == [end + 1]
        assert tokenizer.bos_id is None
        assert tokenizer.vocab_size == end + 208
        assert tokenizer.encode("e\u0301") == tokenizer.encode("é"), "it composes characters first"

    def test_an_unknown_family_says_why_and_what_to_pass(self, tmp_path):
        self.write(tmp_path, "tiktoken.model", "kimi")
        with pytest.raises(UnsupportedModel, match="how text is cut") as caught:
            load_tokenizer(files(tmp_path))
        assert "kimi" in caught.value.cause and "llama" in caught.value.cause
        assert "--tokenizer" in caught.value.fix

    def test_special_tokens_that_nobody_names(self, tmp_path):
        self.write(tmp_path, model_type="chatglm")
        with pytest.raises(UnsupportedModel, match="special tokens") as caught:
            load_tokenizer(files(tmp_path))
        assert "added_tokens_decoder" in caught.value.cause

    def test_a_broken_line_is_named(self, tmp_path):
        self.write(tmp_path)
        with (tmp_path / "tokenizer.model").open("a") as table:
            table.write("not!base64 7\n")
        with pytest.raises(BadCheckpoint, match="line 601"):
            load_tokenizer(files(tmp_path))

    @pytest.mark.parametrize(
        ("line", "cause"),
        [
            (f"{base64_of(b'zzzzzzz')} -1", "the rank -1"),
            (f"{base64_of(b'zzzzzzz')} {2**32}", "the rank 4294967296"),
            (f"{base64_of(b'zzzzzzz')} 5", "the same rank"),
            (f"{base64_of(b'z' * 1_000_000)} 900", "has 1000000 bytes"),
            (f"{base64_of(b'z')} 900", "already"),
        ],
        ids=["a rank below zero", "a rank too large", "a rank twice", "a token too long", "a token twice"],
    )
    def test_a_table_that_makes_no_vocabulary_says_why(self, tmp_path, line, cause):
        self.write(tmp_path)
        with (tmp_path / "tokenizer.model").open("a") as table:
            table.write(f"{line}\n")
        with pytest.raises(BadCheckpoint, match=r"tokenizer\.model is") as caught:
            load_tokenizer(files(tmp_path))
        assert cause in caught.value.cause

    def test_a_byte_without_a_token_would_lose_text(self, tmp_path):
        self.write(tmp_path)
        table = tmp_path / "tokenizer.model"
        kept = [line for line in table.read_text().splitlines() if line.split()[0] != base64_of(b"q")]
        table.write_text("\n".join(kept))
        with pytest.raises(BadCheckpoint, match="not a whole tiktoken table") as caught:
            load_tokenizer(files(tmp_path))
        assert "1 of the 256 bytes, such as b'q'" in caught.value.cause

    def test_a_folder_of_that_name_is_no_table(self, tmp_path):
        (tmp_path / "tokenizer.model").mkdir()
        with pytest.raises(UnsupportedModel, match="has no tokenizer that can be read"):
            load_tokenizer(files(tmp_path))

    def test_a_model_type_that_is_no_name(self, tmp_path):
        self.write(tmp_path, model_type=["llama"])
        with pytest.raises(BadCheckpoint, match=r"config\.json has an odd model_type"):
            load_tokenizer(files(tmp_path))

    def test_a_first_token_that_is_no_text_is_the_familys(self, tmp_path):
        end = len(self.write(tmp_path, bos_token=[1]))
        assert load_tokenizer(files(tmp_path)).encode("x")[0] == end
