"""The GGUF container is read as the gguf package wrote it, in both byte orders, and a broken file says where."""

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.weights.gguf_file import BLOCK_TYPES, read_gguf

METADATA = {
    "t.uint8": (gguf.GGUFValueType.UINT8, 200),
    "t.int8": (gguf.GGUFValueType.INT8, -100),
    "t.uint16": (gguf.GGUFValueType.UINT16, 60000),
    "t.int16": (gguf.GGUFValueType.INT16, -30000),
    "t.uint32": (gguf.GGUFValueType.UINT32, 4_000_000_000),
    "t.int32": (gguf.GGUFValueType.INT32, -2_000_000_000),
    "t.uint64": (gguf.GGUFValueType.UINT64, 2**63),
    "t.int64": (gguf.GGUFValueType.INT64, -(2**62)),
    "t.float32": (gguf.GGUFValueType.FLOAT32, 0.5),
    "t.float64": (gguf.GGUFValueType.FLOAT64, 1e300),
    "t.bool": (gguf.GGUFValueType.BOOL, True),
    "t.string": (gguf.GGUFValueType.STRING, "naïve 👩‍👧"),
    "t.empty": (gguf.GGUFValueType.STRING, ""),
    "t.strings": (gguf.GGUFValueType.ARRAY, ["a", "ßß", "", "日本"]),
    "t.floats": (gguf.GGUFValueType.ARRAY, [0.5, -2.0]),
    "t.ints": (gguf.GGUFValueType.ARRAY, [1, -2, 3]),
    "t.bools": (gguf.GGUFValueType.ARRAY, [True, False]),
    "t.nested": (gguf.GGUFValueType.ARRAY, [[1, 2], [3]]),
}
DENSE = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def write(path, endianess=gguf.GGUFEndian.LITTLE, alignment=None):
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, (kind, value) in METADATA.items():
        writer.add_key_value(key, value, kind)
    writer.add_tensor("dense", DENSE)
    blocks = gguf.quants.quantize(
        np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 64])
@pytest.mark.parametrize("endianess", list(gguf.GGUFEndian))
def test_everything_written_is_read(tmp_path, endianess, alignment):
    file = read_gguf(write(tmp_path / "m.gguf", endianess, alignment))
    assert file.version == 3
    assert file.big_endian == (endianess == gguf.GGUFEndian.BIG)
    assert {key: file.metadata[key] for key in METADATA} == {key: value for key, (_, value) in METADATA.items()}
    assert file.tensors["dense"].shape == (2, 3, 4)
    assert file.tensors["dense"].offset % (alignment or 32) == 0
    order = ">f4" if file.big_endian else "<f4"
    assert np.array_equal(file.raw(file.tensors["dense"]).view(order).reshape(2, 3, 4), DENSE)
    assert (file.tensors["blocks"].type, file.tensors["blocks"].shape) == ("Q8_0", (2, 64))
    assert file.tensors["blocks"].nbytes == 4 * 34


def test_block_sizes_are_those_of_the_gguf_package():
    for kind, (name, elements, nbytes) in BLOCK_TYPES.items():
        known = gguf.GGMLQuantizationType(kind)
        assert (name, elements, nbytes) == (known.name, *gguf.GGML_QUANT_SIZES[known])


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused_by_name(valid, tmp_path, data):
    whole = valid.read_bytes()
    last = max(t.offset + t.nbytes for t in read_gguf(valid).tensors.values())
    cut = data.draw(st.integers(0, last - 1))
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:cut])
    with pytest.raises(BadCheckpoint, match=r"cut\.gguf"):
        read_gguf(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_flipped_byte_never_escapes_as_anything_but_a_typed_error(valid, tmp_path, data):
    whole = bytearray(valid.read_bytes())
    header = min(t.offset for t in read_gguf(valid).tensors.values())
    whole[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(whole)
    try:
        read_gguf(path)
    except (BadCheckpoint, UnsupportedModel) as error:
        assert "flipped.gguf" in error.message
        assert error.fix


def test_a_truncated_tensor_is_named(valid, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(valid.read_bytes()[:-64])
    with pytest.raises(BadCheckpoint, match="tensor blocks"):
        read_gguf(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"not a gguf file at all"])
def test_another_kind_of_file(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint):
        read_gguf(path)


def test_an_unknown_version_is_named(tmp_path, valid):
    whole = bytearray(valid.read_bytes())
    whole[4] = 1
    path = tmp_path / "v1.gguf"
    path.write_bytes(whole)
    with pytest.raises(UnsupportedModel, match="version 1"):
        read_gguf(path)
