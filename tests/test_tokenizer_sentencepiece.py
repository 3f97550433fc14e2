"""SentencePiece vocabularies written into a GGUF give SentencePiece's own ids and text."""

import io
import json
import tempfile
from pathlib import Path

import gguf
import pytest
import sentencepiece

from tidemill.errors import BadCheckpoint
from tidemill.text.sentencepiece_file import read_sentencepiece
from tidemill.text.tokenizer import Tokenizer, load_tokenizer
from tidemill.weights.location import ModelFiles

TRAINING = [
    "The quick brown fox jumps over the lazy dog.",
    "Pack my box with five dozen liquor jugs, and then some more.",
    "def function(argument): return argument + 1",
    "Numbers 1 22 333 4444 and symbols: ! ? ; , . ( ) [ ] { }",
    "naïve café über straße señor",
    "日本語のテキスト と 漢字",
    "a   b    c  spaces    inside",
    "internationalization of tokenization, tokens and tokenizers",
] * 20

TEXTS = [
    "",
    " ",
    "Hello world",
    "The quick tokenizers jump",
    "  two leading, two  inside, trailing  ",
    "line one\nline two\n\n\ttabbed",
    "日本語 and emoji 👩‍👧 plus \u00a0nbsp",
    "café naïve e\u0301",
    "1234567890",
    "unseen: ჯ Ж ∑ ﬁ ①",
    "banana ababab aaaaaaa",
    "def f(x):\n    return x",
]


def train(model_type: str, **options) -> sentencepiece.SentencePieceProcessor:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING),
        model_writer=out,
        model_type=model_type,
        vocab_size=options.pop("vocab_size", 450),
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def metadata_of(processor: sentencepiece.SentencePieceProcessor, model: str, **extra) -> dict:
    """What llama.cpp's converter writes for such a model."""
    count = processor.get_piece_size()
    types = []
    for index in range(count):
        if processor.is_unknown(index):
            types.append(2)
        elif processor.is_control(index):
            types.append(3)
        elif processor.is_byte(index):
            types.append(6)
        elif index in extra.get("user_defined", ()):
            types.append(4)
        else:
            types.append(1)
    extra.pop("user_defined", None)
    metadata = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [processor.id_to_piece(index) for index in range(count)],
        "tokenizer.ggml.scores": [processor.get_score(index) for index in range(count)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def tokenizer_of(metadata: dict) -> Tokenizer:
    """Through a real file: written by the gguf package, loaded as any model's tokenizer is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in metadata.items():
            if key.endswith("precompiled_charsmap"):
                writer.add_precompiled_charsmap(bytes(value))
            else:
                writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return load_tokenizer(ModelFiles("gguf", path, "m"))


@pytest.fixture(scope="module", params=[True, False], ids=["llama", "gemma"])
def bpe(request):
    """Llama's kind prefixes a space, Gemma's does not; both fall back to bytes and change nothing else."""
    processor = train(
        "bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=request.param,
        vocab_size=600,
    )
    return processor, tokenizer_of(metadata_of(processor, "llama", add_space_prefix=request.param))


@pytest.mark.parametrize("text", TEXTS)
def test_bpe_ids_and_text_are_sentencepieces(bpe, text):
    processor, tokenizer = bpe
    ids = processor.encode(text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == processor.decode(ids) == text


def test_bpe_tokens_have_exact_bytes(bpe):
    _, tokenizer = bpe
    joined = b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode("日本 Ж\n"))
    assert joined.decode().removeprefix(" ") == "日本 Ж\n"


def test_llama_starts_with_bos_by_default(bpe):
    processor, _ = bpe
    metadata = metadata_of(processor, "llama")
    del metadata["tokenizer.ggml.add_bos_token"]
    assert tokenizer_of(metadata).encode("hi")[0] == processor.bos_id()
    assert tokenizer_of(metadata).encode("hi", add_special_tokens=False)[0] != processor.bos_id()


def test_control_tokens_in_text_are_special(bpe):
    processor, tokenizer = bpe
    assert tokenizer.encode("</s>", add_special_tokens=False) == [processor.eos_id()]
    assert tokenizer.decode([processor.eos_id()]) == ""


@pytest.mark.parametrize("spelling", ["▁", " "], ids=["as trained", "as llama.cpp converts"])
@pytest.mark.parametrize("text", ["<table>x", "a  b", "a    b   c", "\n\n\nx\n\n", "<table><table>  y", "a▁▁b ▁c"])
def test_user_defined_pieces_are_found_whole(text, spelling):
    symbols = ["<table>", "\n\n", "▁▁", "▁▁▁"]
    processor = train(
        "bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        user_defined_symbols=symbols,
        vocab_size=600,
    )
    defined = [processor.piece_to_id(symbol) for symbol in symbols]
    metadata = metadata_of(processor, "llama", add_space_prefix=False, user_defined=defined)
    for index in defined:
        metadata["tokenizer.ggml.tokens"][index] = metadata["tokenizer.ggml.tokens"][index].replace("▁", spelling)
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.encode(text) == processor.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


@pytest.fixture(scope="module")
def unigram(tmp_path_factory):
    """T5's kind: NFKC by a compiled table, runs of spaces collapsed, a space in front."""
    processor = train("unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1, vocab_size=300)
    (tmp_path_factory.getbasetemp() / "unigram.model").write_bytes(processor.serialized_model_proto())
    charsmap = read_sentencepiece(tmp_path_factory.getbasetemp() / "unigram.model")[
        "tokenizer.ggml.precompiled_charsmap"
    ]
    assert charsmap
    metadata = metadata_of(
        processor, "t5", precompiled_charsmap=charsmap, remove_extra_whitespaces=True, add_space_prefix=True
    )
    del metadata["tokenizer.ggml.bos_token_id"]
    return processor, metadata


@pytest.mark.parametrize("text", TEXTS)
def test_unigram_ids_are_sentencepieces(unigram, text):
    processor, metadata = unigram
    tokenizer = tokenizer_of(metadata)
    ids = processor.encode(text)
    assert tokenizer.encode(text) == ids
    if processor.unk_id() not in ids:
        assert tokenizer.decode(ids) == processor.decode(ids)


def test_unigram_ends_with_eos_by_default(unigram):
    processor, metadata = unigram
    del metadata["tokenizer.ggml.add_eos_token"]
    assert tokenizer_of(metadata).encode("hi")[-1] == processor.eos_id()


class TestModelFile:
    """A folder with a SentencePiece model and no tokenizer.json."""

    def folder(self, tmp_path, processor, **config):
        (tmp_path / "tokenizer.model").write_bytes(processor.serialized_model_proto())
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return ModelFiles("folder", tmp_path, "m")

    def test_bpe(self, tmp_path, bpe):
        processor, _ = bpe
        tokenizer = load_tokenizer(self.folder(tmp_path, processor))
        for text in TEXTS:
            assert tokenizer.encode(text) == [processor.bos_id(), *processor.encode(text)]
            assert tokenizer.decode(processor.encode(text)) == text
        assert (tokenizer.bos_id, tokenizer.eos_id) == (processor.bos_id(), processor.eos_id())

    def test_unigram(self, tmp_path, unigram):
        processor, _ = unigram
        tokenizer = load_tokenizer(self.folder(tmp_path, processor))
        for text in TEXTS:
            assert tokenizer.encode(text) == [*processor.encode(text), processor.eos_id()]

    def test_the_config_says_what_surrounds_a_text_and_adds_tokens(self, tmp_path, bpe):
        processor, _ = bpe
        added = {str(processor.get_piece_size()): {"content": "<|im_end|>", "special": True}}
        config = {"add_bos_token": False, "add_eos_token": True, "added_tokens_decoder": added}
        tokenizer = load_tokenizer(self.folder(tmp_path, processor, **config))
        assert tokenizer.encode("hi") == [*processor.encode("hi"), processor.eos_id()]
        assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [processor.get_piece_size()]

    def test_a_broken_file_is_named(self, tmp_path):
        (tmp_path / "tokenizer.model").write_bytes(b"\x0a\xff\xff\xff")
        with pytest.raises(BadCheckpoint, match=r"tokenizer\.model"):
            load_tokenizer(ModelFiles("folder", tmp_path, "m"))
