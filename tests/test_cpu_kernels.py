"""The CPU's native kernels against the dense product, on every instruction set that this machine runs.

Without a library the tests are skipped, but only where there is no compiler that could have made one. To run them under
the sanitizers see `ops/cpu/build.py`.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading

import pytest
import torch

from tidemill.ops.cpu import build, library
from tidemill.ops.cpu.linear import linear, supports
from tidemill.quant.on_load import pack
from tidemill.quant.packed import PackedWeight, empty
from tidemill.quant.scheme import FP8, INT8, Scheme
from tidemill.quant.stored import StoredMatrix

MISSING = library.available()
needs_library = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
KINDS = [("int", 4, None), ("int", 8, None), ("table", 4, "e2m1"), ("table", 4, "iq4_nl")]
PATHS = library.paths() if MISSING is None else ()
LARGEST_ERROR = 1e-4
"""Of the norm, from rounding activations to 15 bits and from the order of sums. Measured: 2e-5 on average."""


@pytest.fixture(params=PATHS)
def path(request):
    library.use(request.param)
    yield request.param
    library.use(PATHS[0])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_weight(
    outputs: int,
    inputs: int,
    *,
    kind: str = "int",
    bits: int = 4,
    table: str | None = None,
    group: int | None = 32,
    zeros: bool = False,
    wide: bool = False,
) -> PackedWeight:
    made = torch.Generator().manual_seed(outputs * 10007 + inputs)
    scheme = Scheme("test", bits, group, kind, zeros=zeros, wide=wide, table=table)
    weight = empty(scheme, outputs, inputs, lambda shape, dtype: torch.empty(shape, dtype=dtype), "tiles")
    low, high = (0, 16) if table or (bits == 4 and zeros) else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    codes = torch.randint(low, high, (outputs, inputs), generator=made)
    scales = torch.rand(outputs, scheme.groups(inputs), generator=made) * 0.02 + 0.001
    # As formats have them: the zero lies among the codes, rarely outside.
    middle = 0 if table else (low + high - 1) / 2
    shift = torch.randn(scales.shape, generator=made) * (10 if bits == 8 or table == "iq4_nl" else 1)
    weight.store(StoredMatrix(codes, scales, -(middle + shift) * scales if zeros else None, group, table))
    return weight


def random_rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.float() - wanted).norm() / wanted.norm()).item()


def test_a_compiler_makes_a_library():
    if build.compiler() is None:
        pytest.skip("there is no C++ compiler")
    assert MISSING is None or "TIDEMILL_KERNELS" in MISSING, MISSING


@needs_library
@pytest.mark.parametrize("group", [16, 32, 64, 128, None])
@pytest.mark.parametrize(("kind", "bits", "table"), KINDS)
def test_every_scheme(path, kind, bits, table, group):
    for zeros, wide, rows in itertools.product((False, True), (False, True), (1, 2, 7)):
        weight = random_weight(40, 384, kind=kind, bits=bits, table=table, group=group, zeros=zeros, wide=wide)
        x, bias = random_rows(rows, 384), random_rows(40)
        wanted = x @ weight.unpack().T
        assert supports(weight) is None
        assert error(linear(x, weight), wanted) < LARGEST_ERROR, (zeros, wide, rows)
        assert error(linear(x, weight, bias) - bias, wanted) < LARGEST_ERROR, (zeros, wide, rows)


@needs_library
def test_exact_where_activations_are(path):
    """Whole numbers up to 127, one of them 127 in every block, are rounded to themselves."""
    x = torch.randint(-127, 128, (5, 96), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::32] = 127
    for kind, bits, table in KINDS:
        for group, zeros in itertools.product((16, 32, None), (False, True)):
            weight = random_weight(17, 96, kind=kind, bits=bits, table=table, group=group, zeros=zeros)
            assert error(linear(x, weight), x @ weight.unpack().T) < 2e-6


@needs_library
@pytest.mark.parametrize("outputs", [1, 17, 40])
@pytest.mark.parametrize(("inputs", "group"), [(32, 32), (48, 16), (48, None), (96, 32), (576, 64)])
def test_sizes_that_fill_no_tile(path, outputs, inputs, group):
    for rows in (*range(1, 10), 33):
        weight, x = random_weight(outputs, inputs, group=group, zeros=True), random_rows(rows, inputs)
        assert error(linear(x, weight), x @ weight.unpack().T) < 1e-3


@needs_library
def test_a_row_is_the_same_in_every_company(path):
    """Among other rows, in another place, and on two threads: bit for bit."""
    for bits, group, zeros in ((4, 32, True), (4, 128, False), (8, None, False), (8, 16, True)):
        weight, x = random_weight(592, 768, bits=bits, group=group, zeros=zeros), random_rows(200, 768)
        torch.set_num_threads(1)
        alone = torch.cat([linear(x[row : row + 1], weight) for row in (0, 1, 130, 199)])
        together = linear(x, weight)
        assert torch.equal(together[[0, 1, 130, 199]], alone)
        assert torch.equal(linear(x[:7], weight), together[:7])
        torch.set_num_threads(2)
        assert torch.equal(linear(x, weight), together)
        assert torch.equal(linear(x[:1], weight), alone[:1])


@needs_library
def test_numbers_at_the_edges(path):
    weight = random_weight(40, 128, zeros=True)
    dense, x = weight.unpack(), random_rows(3, 128)
    assert torch.equal(linear(torch.zeros(2, 128), weight), torch.zeros(2, 40))
    for factor in (1e30, 1e-30):
        found = linear(x * factor, weight)
        assert error(found.double() / factor, (x @ dense.T).double()) < LARGEST_ERROR
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoilt = x.clone()
        spoilt[1, 70] = bad
        found = linear(spoilt, weight)
        assert not found[1].isfinite().any()
        assert torch.equal(found[[0, 2]], linear(x, weight)[[0, 2]])


@needs_library
def test_shapes_and_types_of_activations(path):
    weight, x = random_weight(40, 96), random_rows(2, 3, 96)
    wanted = linear(x, weight)
    assert wanted.shape == (2, 3, 40)
    assert torch.equal(linear(x.transpose(0, 1), weight), wanted.transpose(0, 1))
    narrow = linear(x.bfloat16(), weight, torch.zeros(40, dtype=torch.bfloat16))
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, linear(x.bfloat16().float(), weight).bfloat16())
    assert linear(x.half(), weight).dtype == torch.float16
    assert linear(x[:0], weight).shape == (0, 3, 40)


@needs_library
def test_part_of_a_weight(path):
    weight, x = random_weight(80, 96, group=None, bits=8), random_rows(2, 96)
    assert torch.equal(linear(x, weight.rows(32, 80)), linear(x, weight)[:, 32:])


@needs_library
@pytest.mark.parametrize("group", [None, 128])
def test_fp8(path, group):
    scheme = Scheme("fp8", 8, group, "fp8", wide=True)
    weight = empty(scheme, 48, 384, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    numbers = torch.arange(48 * 384, dtype=torch.int32).mul_(7919).to(torch.uint8)
    numbers[(numbers & 127) == 127] = 0
    weight.data.copy_(numbers.view(48, 384).view(torch.float8_e4m3fn))
    weight.scales.copy_(random_rows(*weight.scales.shape).abs() * 0.01)
    for rows in (1, 3, 4, 9):
        x = random_rows(rows, 384)
        wanted = (x.double() @ weight.unpack().double().T).float()
        assert error(linear(x, weight), wanted) < 1e-5
    assert torch.equal(linear(x, weight.rows(16, 35)), linear(x, weight)[:, 16:35])
    torch.set_num_threads(2)
    assert torch.equal(linear(x, weight)[:1], linear(x[:1], weight))
    weight.data.view(torch.uint8)[5, 100] = 0xFF
    assert linear(x, weight).isnan().nonzero()[:, 1].unique().tolist() == [5]


@needs_library
def test_what_is_not_supported_has_a_reason():
    dense = random_rows(16, 64)
    assert "words" in (supports(pack(dense, INT8)) or "")
    assert supports(pack(dense, INT8, "tiles")) is None
    assert supports(pack(dense, FP8)) is None
    assert "nf4" in (supports(random_weight(16, 64, kind="table", table="nf4")) or "")


@needs_library
def test_two_callers_at_once():
    weight, x = random_weight(2048, 512), random_rows(4, 512)
    torch.set_num_threads(2)
    wanted, wrong = linear(x, weight), []

    def call() -> None:
        torch.set_num_threads(2)
        for _ in range(200):
            if not torch.equal(linear(x, weight), wanted):
                wrong.append(1)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_computes():
    weight, x = random_weight(2048, 512), random_rows(4, 512)
    torch.set_num_threads(2)
    wanted = linear(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear(x, weight), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(linear(x, weight), wanted)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"TIDEMILL_KERNELS": "reference"}, "TIDEMILL_KERNELS=reference is set"),
        pytest.param({"TIDEMILL_CPU_ISA": "abacus"}, "TIDEMILL_CPU_ISA=abacus is not", marks=needs_library),
        pytest.param({"TIDEMILL_CPU_ISA": "portable"}, "None", marks=needs_library),
    ],
)
def test_switches(variables, reason):
    asked = "from tidemill.ops.cpu import library; print(library.available())"
    answer = subprocess.run(
        [sys.executable, "-c", asked], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert answer.stdout.startswith(reason)


def test_a_library_that_does_not_fit_is_not_used(tmp_path):
    with pytest.raises(library.Unavailable, match="not compiled"):
        library._load(tmp_path / "libtidemill.so")
    (tmp_path / "libtidemill.so").write_text("nothing a loader knows")
    with pytest.raises(library.Unavailable, match="does not load"):
        library._load(tmp_path / "libtidemill.so")


@needs_library
def test_a_library_of_other_sources_is_not_used(monkeypatch):
    monkeypatch.setattr(library, "sources_hash", lambda: "0123456789abcdef")
    with pytest.raises(library.Unavailable, match="other sources"):
        library._load(library.LIBRARY_PATH)


def test_without_a_compiler_there_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.NoLibrary, match=r"no C\+\+ compiler"):
        build.build(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.NoLibrary, match="cannot be started"):
        build.build(tmp_path)
    assert list(tmp_path.iterdir()) == []
