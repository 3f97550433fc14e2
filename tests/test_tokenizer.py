"""A tokenizer from a Hugging Face folder gives transformers' own ids, and refuses what it cannot do."""

import json
import threading
import time

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tidemill.errors import BadCheckpoint, InvalidRequest, UnsupportedModel
from tidemill.text.tokenizer import load_tokenizer
from tidemill.weights.location import ModelFiles

TEXTS = [
    "",
    " ",
    "Hello world, hello <s>tokens</s>!",
    "  spaces   and\ttabs\n\n",
    "naïve café 日本語 👩‍👧 e\u0301",
    "<|user|>hi<|end|><tool>x",
    "1234 don't",
]


def files(folder) -> ModelFiles:
    return ModelFiles("folder", folder, str(folder))


def write_llama_folder(folder, **config):
    """Llama 2's shape: SentencePiece-style BPE with byte fallback, spaces by normalizer, bos by template."""
    alphabet = sorted(set("".join(TEXTS).replace(" ", "") + "▁abcdefghijklmnopqrstuvwxyz,."))
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>"])}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for character in alphabet:
        if character.isascii() or character in "▁ïé":
            vocabulary.setdefault(character, len(vocabulary))
    merges = [("▁", "h"), ("l", "l"), ("e", "ll"), ("▁h", "ell"), ("▁hell", "o"), ("▁", "▁")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = [tokenizers.AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    backend.add_special_tokens(special)
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    (folder / "config.json").write_text("{}")


def write_byte_level_folder(folder, **config):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    backend.train_from_iterator(TEXTS * 5, trainer)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    (folder / "config.json").write_text("{}")


CASES = {
    "llama": (write_llama_folder, {}),
    "llama without bos": (write_llama_folder, {"add_bos_token": False, "add_eos_token": False}),
    "llama with eos": (write_llama_folder, {"add_bos_token": True, "add_eos_token": True}),
    "byte level": (write_byte_level_folder, {}),
    "byte level with bos": (write_byte_level_folder, {"bos_token": "<|user|>", "add_bos_token": True}),
    "tokens added by the config": (
        write_byte_level_folder,
        {
            "added_tokens_decoder": {
                "400": {"content": "<|user|>", "special": True, "normalized": False},
                "401": {"content": "<tool>", "special": False, "normalized": False},
            }
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write, config = CASES[request.param]
    write(folder, **config)
    return load_tokenizer(files(folder)), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(pair, text, add_special_tokens):
    ours, theirs = pair
    ids = theirs(text, add_special_tokens=add_special_tokens, truncation=False)["input_ids"]
    assert ours.encode(text, add_special_tokens) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_those_of_transformers(pair):
    ours, theirs = pair
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids == {token for token, added in theirs.added_tokens_decoder.items() if added.special}
    assert ours.vocab_size == len(theirs)
    named = {name: str(token) for name, token in theirs.special_tokens_map.items() if isinstance(token, str)}
    assert ours.special_tokens_map == named


def test_a_batch_is_each_text_alone(pair):
    ours, _ = pair
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]


def test_bytes_of_tokens_join_to_the_text(pair):
    ours, _ = pair
    for text in ("x", "Hello world", "  spaces   and\ttabs\n\n", "naïve 日本語 👩‍👧 e\u0301"):
        ids = ours.encode(text, add_special_tokens=False)
        assert b"".join(ours.token_bytes(token) for token in ids).decode() in (text, " " + text)


class TestStops:
    def test_eos_of_tokenizer_generation_config_and_config_together(self, tmp_path):
        write_byte_level_folder(tmp_path)
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
        (tmp_path / "config.json").write_text('{"eos_token_id": 9, "text_config": {"eos_token_id": 11}}')
        assert load_tokenizer(files(tmp_path)).eos_ids == (0, 7, 9, 11)

    def test_the_model_says_the_stops_even_with_another_tokenizer(self, tmp_path):
        model, other = tmp_path / "model", tmp_path / "other"
        model.mkdir()
        other.mkdir()
        write_byte_level_folder(other)
        (model / "config.json").write_text('{"eos_token_id": 5}')
        assert load_tokenizer(files(model), tokenizer=str(other)).eos_ids == (0, 5)


def test_the_legacy_special_tokens_map_is_read(tmp_path):
    write_byte_level_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>"}, "pad_token": "<|end|>"}')
    tokenizer = load_tokenizer(files(tmp_path))
    assert tokenizer.special_tokens_map == {"eos_token": "<|end|>", "pad_token": "<|end|>"}
    assert tokenizer.eos_id == 0


def test_what_only_transformers_reads_goes_through_transformers(tmp_path):
    """GPT-2's old pair of files: a vocabulary and merges."""
    write_byte_level_folder(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    expected = load_tokenizer(files(tmp_path)).encode("Hello world, 1234")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"}')
    tokenizer = load_tokenizer(files(tmp_path))
    assert tokenizer.encode("Hello world, 1234") == expected
    assert tokenizer.eos_id == 0


class TestRefusals:
    def test_a_broken_tokenizer_json_is_named(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text('{"model": 1}')
        with pytest.raises(BadCheckpoint, match=r"tokenizer\.json"):
            load_tokenizer(files(tmp_path))

    def test_no_tokenizer_at_all_says_what_to_pass(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(UnsupportedModel) as caught:
            load_tokenizer(files(tmp_path))
        assert "--tokenizer" in caught.value.fix
        assert "it holds no vocabulary: neither tokenizer.json" in caught.value.cause

    def test_a_vocabulary_nobody_can_read_comes_with_all_that_transformers_says_of_it(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / "vocab.json").write_text("[")
        with pytest.raises(UnsupportedModel) as caught:
            load_tokenizer(files(tmp_path))
        assert "transformers makes none of vocab.json: " in caught.value.cause
        assert not caught.value.cause.endswith(":")

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tekken.json", "qwen.tiktoken"])
    def test_a_git_lfs_pointer_is_called_one(self, tmp_path, name):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 100\n")
        with pytest.raises(BadCheckpoint, match=f"{name} is a Git LFS pointer"):
            load_tokenizer(files(tmp_path))

    @pytest.mark.parametrize("value", ["</s>", [None], {}, 1.5, True, [[1]], "2"])
    @pytest.mark.parametrize("place", ["config.json", "generation_config.json", "text_config"])
    def test_an_end_that_is_no_id_is_named_with_its_file(self, tmp_path, place, value):
        write_byte_level_folder(tmp_path)
        name, key = ("config.json", "text_config.eos_token_id") if place == "text_config" else (place, "eos_token_id")
        ends = {"eos_token_id": value}
        (tmp_path / name).write_text(json.dumps({"text_config": ends} if place == "text_config" else ends))
        with pytest.raises(BadCheckpoint, match=rf"{name} has an odd {key}$") as caught:
            load_tokenizer(files(tmp_path))
        assert repr(value) in caught.value.cause

    def test_an_end_below_zero_is_told_and_ends_nothing(self, tmp_path, caplog):
        write_byte_level_folder(tmp_path)
        (tmp_path / "config.json").write_text('{"eos_token_id": [-7, 3]}')
        assert load_tokenizer(files(tmp_path)).eos_ids == (0, 3)
        assert "eos_token_id has -7" in caplog.text

    @pytest.mark.parametrize("value", [{"x": {"content": "<a>"}}, {"-1": {"content": "<a>"}}, [1], {"9" * 20: "<a>"}])
    def test_added_tokens_under_what_is_no_id(self, tmp_path, value):
        write_byte_level_folder(tmp_path, added_tokens_decoder=value)
        with pytest.raises(BadCheckpoint, match=r"tokenizer_config\.json has an odd entry 'added_tokens_decoder'"):
            load_tokenizer(files(tmp_path))

    @pytest.mark.parametrize("value", ["x", None, [1], 1.5, -1, 10**20])
    def test_added_tokens_of_older_files_with_what_is_no_id(self, tmp_path, value):
        write_byte_level_folder(tmp_path)
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": value}))
        with pytest.raises(BadCheckpoint, match=r"added_tokens\.json has an odd entry '<tool>'"):
            load_tokenizer(files(tmp_path))

    def test_a_model_type_that_is_no_name(self, tmp_path):
        write_llama_folder(tmp_path, tokenizer_class="LlamaTokenizer")
        (tmp_path / "config.json").write_text('{"model_type": ["llama"]}')
        with pytest.raises(BadCheckpoint, match=r"config\.json has an odd model_type"):
            load_tokenizer(files(tmp_path))

    def test_half_a_surrogate_pair_is_an_invalid_request(self, pair):
        with pytest.raises(InvalidRequest, match="surrogate"):
            pair[0].encode("bad \ud83d text")

    def test_something_else_than_text(self, pair):
        with pytest.raises(InvalidRequest, match="int"):
            pair[0].encode_batch(["fine", 3])


def test_encoding_lets_other_threads_run(pair):
    """The server encodes beside its event loop: a long prompt must not hold the interpreter."""
    ours, _ = pair
    text = "hello world " * 40_000
    ticks, done = 0, threading.Event()

    def tick():
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    ours.encode(text)
    done.set()
    thread.join()
    assert ticks > 5
