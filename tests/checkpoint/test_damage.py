"""Whatever happens to a saved folder is found before anything is loaded, and said in one sentence."""

import json
import os
import pickle
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from parallax.checkpoint import verify as verification
from parallax.checkpoint.find import find_latest
from parallax.checkpoint.load import load, read_state
from parallax.checkpoint.manifest import Manifest, read_manifest
from parallax.checkpoint.save import save
from parallax.checkpoint.verify import verify
from parallax.errors import ConfigError
from tests.checkpoint.runs import LLAMA, TIED, build_parts, differences, rewrite_manifest, single_process_mesh

MESH = single_process_mesh()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    return save(root, 100, build_parts(MESH, LLAMA, zero=0, seed=1, fill=True), MESH)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def refused(folder: Path, inside_of_a_tensor: bool = False) -> str:
    """Return the sentence with which loading is refused, after seeing that nothing was changed but what was read before."""
    parts = build_parts(MESH, LLAMA, zero=0, seed=2, fill=True)
    with pytest.raises(ConfigError) as raised:
        load(folder, parts, MESH)
    assert inside_of_a_tensor or differences(parts, seed=2) == []
    assert verify(folder) != []
    message = str(raised.value)
    assert "\n" not in message, message
    return message


def test_a_good_checkpoint_has_no_problems(saved: Path) -> None:
    assert verify(saved) == []
    assert read_state(saved) == {
        "step": 100,
        "optimizer": {"step_count": 8},
        "training": {"seed": 1, "tokens": 1 << 40},
    }


def test_flipped_bits_anywhere_are_found(folder: Path) -> None:
    chance = random.Random(0)
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        good = path.read_bytes()
        for position in {0, len(good) - 1, *(chance.randrange(len(good)) for _ in range(30))}:
            flipped = bytes([good[position] ^ (1 << chance.randrange(8))])
            path.write_bytes(good[:position] + flipped + good[position + 1 :])
            problems = verify(folder)
            assert problems and str(path) in problems[0], (path, position)
        path.write_bytes(good)
    assert verify(folder) == []


def test_a_flipped_bit_in_a_header_is_told_as_damage_and_a_header_that_lies_as_a_lie(folder: Path) -> None:
    path = folder / "model" / "model-00001-of-00001.safetensors"
    good = path.read_bytes()
    for position in (3, 9, 40, good.index(b"F32"), good.index(b"data_offsets") + 18):
        path.write_bytes(good[:position] + bytes([good[position] ^ 16]) + good[position + 1 :])
        assert refused(folder) == f"{path} is damaged: its checksum is not the one that was saved"
    path.write_bytes(good.replace(b"F32", b"I32", 1))
    rewrite_manifest(folder, str(path.relative_to(folder)))
    assert "and the manifest disagree about the tensor" in refused(folder)


def test_a_verification_that_is_broken_off_does_not_read_files_to_their_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "THREADS", 2)
    ended: list[bool] = []

    def read(path: Path, whole: bool, is_given_up: Callable[[], bool]) -> tuple[str, ...]:
        if path.suffix == ".json":
            raise KeyboardInterrupt  # as of the one who waits for it
        deadline = time.monotonic() + 20
        while not is_given_up() and time.monotonic() < deadline:
            time.sleep(0.01)
        ended.append(is_given_up())
        return ()

    monkeypatch.setattr(verification, "hash_file", read)
    with pytest.raises(KeyboardInterrupt):
        verify(folder)
    assert all(ended)


def test_a_flipped_bit_is_refused_and_named(folder: Path) -> None:
    path = next((folder / "optimizer").iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert refused(folder, inside_of_a_tensor=True) == f"{path} is damaged: its checksum is not the one that was saved"


def test_truncated_and_missing_files_are_refused_and_not_found_as_the_latest(folder: Path) -> None:
    older = folder.with_name("step-00000050")
    shutil.copytree(folder, older)
    manifest = read_manifest(older)
    (older / "manifest.json").write_bytes(Manifest(50, manifest.files, manifest.model, manifest.optimizer).encode())
    assert find_latest(folder.parent) == folder
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        good = path.read_bytes()
        path.write_bytes(good[:-1])
        assert verify(folder) and find_latest(folder.parent) == older
        path.unlink()
        assert verify(folder) and find_latest(folder.parent) == older
        path.write_bytes(good)
    assert find_latest(folder.parent) == folder
    path = folder / "model" / "config.json"
    path.write_bytes(path.read_bytes()[:-1])
    assert "bytes, " in refused(folder)
    path.unlink()
    assert "config.json is missing" in refused(folder)


def test_a_pickle_renamed_to_safetensors_is_refused_although_its_checksum_holds(folder: Path) -> None:
    path = next((folder / "model").glob("*.safetensors"))
    path.write_bytes(pickle.dumps(list(range(100_000))))
    with path.open("ab") as file:  # as long as it was, so that the slices of the manifest lie inside
        file.truncate(max(path.stat().st_size, 200_000))
    rewrite_manifest(folder, path.relative_to(folder).as_posix())
    assert refused(folder) == f"{path} is not a safetensors file"


def test_a_pickle_beside_the_model_is_refused_by_name(folder: Path) -> None:
    path = folder / "model" / "pytorch_model.bin"
    path.write_bytes(pickle.dumps({}))
    assert f"{path} looks like a pickle" in refused(folder)


def test_a_header_that_moves_a_tensor_is_refused_although_its_checksum_holds(folder: Path) -> None:
    path = next((folder / "optimizer").iterdir())
    content = path.read_bytes()
    first, second = b"model.layers.0.self_attn.q_proj.weight.exp_avg", b"model.layers.1.self_attn.q_proj.weight.exp_avg"
    swapped = content.replace(first, b"@" * len(first)).replace(second, first).replace(b"@" * len(first), second)
    assert swapped != content
    path.write_bytes(swapped)
    rewrite_manifest(folder, path.relative_to(folder).as_posix())
    assert "disagree about the tensor" in refused(folder)


def _linked_file(folder: Path, outside: Path) -> None:
    path = folder / "model" / "config.json"
    path.rename(outside)
    path.symlink_to(outside)


def _linked_folder(folder: Path, outside: Path) -> None:
    (folder / "model").rename(outside)
    (folder / "model").symlink_to(outside)


def _pipe(folder: Path, outside: Path) -> None:
    (folder / "model" / "config.json").unlink()
    os.mkfifo(folder / "model" / "config.json")


@pytest.mark.parametrize("replace", [_linked_file, _linked_folder, _pipe])
def test_links_out_of_the_folder_and_pipes_are_refused(
    replace: Callable[[Path, Path], None], folder: Path, tmp_path: Path
) -> None:
    replace(folder, tmp_path / "outside")
    assert "is no regular file inside the checkpoint" in refused(folder)


def test_another_model_is_refused_with_the_field_that_differs(saved: Path) -> None:
    parts = build_parts(MESH, TIED, zero=0, seed=2)
    with pytest.raises(ConfigError, match="is of another model: its model_type is llama, this run's is qwen3"):
        load(saved, parts, MESH)


def test_another_type_is_refused_with_the_flag(saved: Path) -> None:
    parts = build_parts(MESH, LLAMA, zero=0, seed=2, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="is of type F32, this run needs BF16; see --precision"):
        load(saved, parts, MESH)


def test_a_checkpoint_without_optimizer_states_is_refused_where_they_are_needed(tmp_path: Path) -> None:
    parts = build_parts(MESH, LLAMA, zero=0, seed=2)
    bare = build_parts(MESH, LLAMA, zero=0, seed=1, fill=True)
    bare.optimizer = None
    path = save(tmp_path, 1, bare, MESH)
    with pytest.raises(ConfigError, match=r"has no tensor model\.embed_tokens\.weight\.exp_avg, which this run needs"):
        load(path, parts, MESH)
    parts.optimizer = None
    load(path, parts, MESH)
    assert differences(parts, seed=1) == []


def test_duplicate_keys_in_a_state_are_refused_although_the_checksum_holds(folder: Path) -> None:
    (folder / "state.json").write_text('{"step": 1, "step": 2, "optimizer": {"step_count": 1}, "training": {}}')
    rewrite_manifest(folder, "state.json")
    with pytest.raises(ConfigError, match="a key comes twice"):
        read_state(folder)
    (folder / "state.json").write_text(json.dumps([1]))
    rewrite_manifest(folder, "state.json")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        read_state(folder)


def test_a_folder_without_a_state_or_under_another_name_is_told_by_all_who_look(folder: Path) -> None:
    renamed = folder.with_name("step-00000500")
    shutil.copytree(folder, renamed)
    assert find_latest(renamed.parent, older_than=501) != renamed
    assert verify(renamed) == [f"{renamed} holds step {read_manifest(folder).step}, not the one that it is named after"]
    (folder / "state.json").write_text(json.dumps({"step": 7, "optimizer": {}, "training": {}}))
    rewrite_manifest(folder, "state.json")
    (problem,) = verify(folder)
    assert "state.json is not the state of a run at step" in problem
    manifest = read_manifest(folder)
    files = {name: record for name, record in manifest.files.items() if name != "state.json"}
    (folder / "manifest.json").write_bytes(Manifest(manifest.step, files, manifest.model, manifest.optimizer).encode())
    assert verify(folder) == [f"{folder} is no checkpoint of a run: it has no state.json"]
    assert find_latest(folder.parent, older_than=500) != folder
