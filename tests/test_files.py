from pathlib import Path

import pytest

from rft_batch.files import file_digest, files_digest, publish, publish_folder, publish_json


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    publish_json(path, {"a": 1})

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        publish(path, fail)

    assert path.read_text() == '{\n  "a": 1\n}\n'


def test_a_leftover_temporary_file_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.json.tmp").write_text("half of something")
    publish_json(tmp_path / "a.json", [1])
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    for names in (["a", "b"], ["c"]):
        publish_folder(tmp_path / "f", lambda t, names=names: [(t / n).touch() for n in names])
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["c"]
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_published_files_can_be_read_by_others(tmp_path: Path) -> None:
    def private(temporary: Path) -> None:
        temporary.touch(mode=0o600)

    publish(tmp_path / "a", private)
    publish_folder(tmp_path / "f", lambda t: private(t / "b"))
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "f" / "b")]
    assert modes == [0o644, 0o644]


def test_the_digest_of_several_files_is_that_of_their_bytes_together(tmp_path: Path) -> None:
    for name, content in (("a", b"12"), ("b", b"3"), ("all", b"123")):
        (tmp_path / name).write_bytes(content)
    assert files_digest([tmp_path / "a", tmp_path / "b"]) == file_digest(tmp_path / "all")
